"""Reading how far a trial has come, without running what the pickle carries."""

from __future__ import annotations

import dataclasses
import io
import pathlib
import pickle
import pickletools
from typing import Any, NoReturn

from det_lightning import errors
from det_lightning.checkpoint.format.content import TrialState, find_wrong_counts, short_text
from det_lightning.checkpoint.format.layout import TRIAL_STATE_FILE, WORKLOAD_FILE, read_bytes

__all__ = ["read_trial_state"]

# A dict of a few numbers has some hundred bytes.
_MAX_BYTES = 64 * 1024
# With these a few bytes describe keys that take years to hash.
_NESTING = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET", "ADDITEMS", "DUP"}
# At the first of these the unpickler stops by itself.
_REFERRING = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}


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


def read_trial_state(directory: pathlib.Path, *, trusted: bool = False) -> tuple[TrialState, bool]:
    """Read how far the trial of a checkpoint had come.

    Args:
        directory: the checkpoint's.
        trusted: unpickle anything, running whatever code the file asks for.

    Returns:
        The state, and whether ``epochs_trained`` is known: ``workload_sequencer.pkl`` of older releases does not tell
        it, and a checkpoint with neither file tells nothing.

    Raises:
        UnsafeCheckpointError: the pickle refers to classes or functions and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged.
    """
    for name in (TRIAL_STATE_FILE, WORKLOAD_FILE):
        path = directory / name
        if path.is_file():
            values = _read_pickle(path, trusted)
            return _checked(values, path), "epochs_trained" in values
    return TrialState(), False


def _read_pickle(path: pathlib.Path, trusted: bool) -> dict[str, Any]:
    content = read_bytes(path)
    try:
        if not trusted:
            _require_small(content)
        values = pickle.loads(content) if trusted else _PlainUnpickler(content, path).load()
    except errors.CheckpointError:
        raise
    except Exception as e:  # unpickling damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} can not be read, it may be damaged: {e}") from e
    if not isinstance(values, dict):
        raise errors.IncompleteCheckpointError(f"{path} should hold a dict; it holds a {type(values).__name__}.")
    return values


def _require_small(content: bytes) -> None:
    """Raise if a pickle would take much more memory or time than it has bytes."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has {len(content):,} bytes")
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name in _REFERRING:
            return
        if operation.name in _NESTING:
            raise ValueError("it holds more than numbers and names")
        # Memory is taken for all places up to the one that is used.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > number:
            raise ValueError(f"it numbers its values up to {argument:,}")


def _checked(values: dict[str, Any], path: pathlib.Path) -> TrialState:
    names = [field.name for field in dataclasses.fields(TrialState)]
    if values.keys().isdisjoint([*names, "steps_completed"]):
        raise errors.IncompleteCheckpointError(
            f"{path} should hold {', '.join(names)}; it has {short_text(sorted(map(short_text, values)))}. It is "
            "damaged, or the file of something else."
        )
    # Older releases counted in "steps_completed"; what they kept beyond our fields is of no use here.
    values = {"batches_trained": values.get("steps_completed"), **values}
    known = {name: 0 if values.get(name) is None else values[name] for name in names}
    wrong = find_wrong_counts(known)
    if wrong is not None:
        raise errors.IncompleteCheckpointError(f"{path} {wrong}.")
    return TrialState(**known)
