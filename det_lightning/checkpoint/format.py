"""The files of a checkpoint directory, and how to read them without running what they carry.

Determined 0.38 writes ``state_dict.pth``, ``trial_state.pkl``, ``load_data.json``, ``code/`` and, last of all,
``metadata.json``. det_lightning adds ``resume.pth``, with what an exact resume needs beyond that; Determined ignores
the file.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import pickle
from typing import Any, NoReturn

import numpy as np
import torch

from det_lightning import errors
from det_lightning.checkpoint.state import TrialState

__all__ = [
    "CODE_DIR",
    "LOAD_DATA_FILE",
    "METADATA_FILE",
    "RESUME_FILE",
    "STATE_FILE",
    "TRIAL_STATE_FILE",
    "CheckpointContent",
    "numpy_globals",
    "read_checkpoint",
    "read_json",
    "read_state",
]

STATE_FILE = "state_dict.pth"
TRIAL_STATE_FILE = "trial_state.pkl"
LOAD_DATA_FILE = "load_data.json"
METADATA_FILE = "metadata.json"
RESUME_FILE = "resume.pth"
CODE_DIR = "code"


@dataclasses.dataclass
class CheckpointContent:
    """What :func:`read_checkpoint` found.

    Attributes:
        directory: where.
        state: content of ``state_dict.pth``.
        trial_state: how far the trial had come.
        resume: content of ``resume.pth``; None if Determined wrote the checkpoint.
    """

    directory: pathlib.Path
    state: dict[str, Any]
    trial_state: TrialState
    resume: dict[str, Any] | None


def numpy_globals() -> list[Any]:
    """List what pickled numpy values refer to, under the names of numpy 1 and 2; none of it runs code."""
    reconstruct = np.ndarray.__reduce__(np.zeros(1))[0]
    scalar = np.float64(0).__reduce__()[0]
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUV"]
    return [
        np.ndarray,
        np.dtype,
        *dict.fromkeys(dtypes),
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *((scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    ]


def read_state(path: pathlib.Path, *, trusted: bool = False, **torch_load_kwargs: Any) -> dict[str, Any]:
    """Read a file that ``torch.save`` wrote: tensors, numpy values and plain Python containers.

    Args:
        path: the file.
        trusted: unpickle anything, running whatever code the file asks for.
        **torch_load_kwargs: arguments of ``torch.load``; tensors go to the CPU by default.

    Raises:
        UnsafeCheckpointError: the file refers to other things and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged or holds no dict.
    """
    kwargs = {"map_location": "cpu", "weights_only": not trusted, **torch_load_kwargs}
    try:
        with torch.serialization.safe_globals(numpy_globals()):
            state = torch.load(path, **kwargs)
    except pickle.UnpicklingError as e:
        if kwargs["weights_only"] and "Unsupported" in str(e):
            reason = str(e).partition("Unsupported ")[2].partition("\n")[0].strip()
            raise errors.UnsafeCheckpointError(
                f"{path} holds more than tensors and plain values ({reason}), and reading that could run code. If you "
                "know where the file comes from, pass trusted=True."
            ) from e
        raise errors.IncompleteCheckpointError(
            f"{path} can not be read, it is damaged or holds Python objects: {e}. If it should hold objects and you "
            "know where it comes from, pass trusted=True."
        ) from e
    except Exception as e:  # reading damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} can not be read, it may be damaged: {e}") from e
    if not isinstance(state, dict):
        raise errors.IncompleteCheckpointError(f"{path} should hold a dict; it holds a {type(state).__name__}.")
    return state


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers and strings, which need no imports."""

    def __init__(self, content: bytes, path: pathlib.Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise errors.UnsafeCheckpointError(
            f"{self._path} refers to {module_name}.{global_name}, and reading that could run code. If you know where "
            "the file comes from, pass trusted=True."
        )


def read_trial_state(path: pathlib.Path, *, trusted: bool = False) -> TrialState:
    """Read ``trial_state.pkl``.

    Raises:
        UnsafeCheckpointError: the pickle refers to classes or functions and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged.
    """
    content = path.read_bytes()
    try:
        values = pickle.loads(content) if trusted else _PlainUnpickler(content, path).load()
        state = TrialState(**values)
    except errors.CheckpointError:
        raise
    except Exception as e:  # unpickling damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} can not be read, it may be damaged: {e}") from e
    wrong = {name: value for name, value in vars(state).items() if not isinstance(value, int)}
    if wrong and not trusted:
        raise errors.IncompleteCheckpointError(f"{path} should hold integers; it has {wrong}.")
    return state


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        IncompleteCheckpointError: the file is damaged or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise errors.IncompleteCheckpointError(f"{path} can not be read, it may be damaged: {e}") from e
    if not isinstance(content, dict):
        raise errors.IncompleteCheckpointError(f"{path} should hold a JSON object; got {type(content).__name__}.")
    return content


def read_checkpoint(directory: pathlib.Path, *, trusted: bool = False) -> CheckpointContent:
    """Read the checkpoint in ``directory``.

    Args:
        directory: a checkpoint's own directory.
        trusted: unpickle anything, running whatever code the files ask for.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: it was not written to its end, or is damaged.
        UnsafeCheckpointError: it refers to code and is not ``trusted``.
    """
    require_complete(directory)
    state = read_state(directory / STATE_FILE, trusted=trusted)
    trial_state_file, resume_file = directory / TRIAL_STATE_FILE, directory / RESUME_FILE
    return CheckpointContent(
        directory=directory,
        state=state,
        trial_state=read_trial_state(trial_state_file, trusted=trusted) if trial_state_file.exists() else TrialState(),
        resume=read_state(resume_file, trusted=trusted) if resume_file.exists() else None,
    )


def require_complete(directory: pathlib.Path) -> None:
    """Raise unless ``directory`` holds a checkpoint that was written to its end.

    Raises:
        CheckpointNotFound: there is no checkpoint.
        IncompleteCheckpointError: a file is missing.
    """
    if not directory.is_dir():
        raise errors.CheckpointNotFound(f"There is no checkpoint directory {directory}.")
    missing = [name for name in (STATE_FILE, METADATA_FILE) if not (directory / name).is_file()]
    if len(missing) == 2:
        raise errors.CheckpointNotFound(f"{directory} holds no checkpoint: {STATE_FILE} is missing.")
    if missing:
        raise errors.IncompleteCheckpointError(
            f"{directory} is an incomplete checkpoint: {missing[0]} is missing. It was not written to its end; use an "
            "earlier checkpoint."
        )
