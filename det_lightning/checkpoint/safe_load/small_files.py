"""Reads the small files of a checkpoint: ``trial_state.pkl``, ``load_data.json``, random states of Estimators."""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
import pickle
import pickletools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.content import TrialState
from det_lightning.checkpoint.safe_load.pickle_scanner import UnsafeReference
from det_lightning.checkpoint.safe_load.safe_globals import RANDOM_STATES, finish
from det_lightning.masking import short_text

# A dict of a few numbers has some hundreds of bytes, the states of random generators some thousands.
_MAX_BYTES = 64 * 1024
# With these operations a few bytes describe keys that take years to hash, or whose hashing ends the process.
_NESTING = {"FROZENSET", "ADDITEMS", "DUP"}
# So do many tuples, or tuples that each occur twice; the pickle of random states refers back to a few values.
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MAX_TUPLES = 1000
_REPEATING = {"GET", "BINGET", "LONG_BINGET"}
_MAX_REPEATED = 20
_KINDS: dict[str, tuple[Any, str]] = {
    "hparams": (dict | None, "an object"),
    "experiment_config": (dict | None, "an object"),
    "is_trainer": (bool | None, "true or false"),
    "trial_type": (str | None, "a string"),
}
# The platform's entrypoint can also be a command.
_MAX_SPEC_CHARS = 100_000


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._known = known

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self._known:
            raise UnsafeReference(name)
        found = self._known[name]
        # A file can set attributes of whatever it names: of a function of its own, or of a class, which refuses them.
        return found if isinstance(found, type) else functools.partial(found)


def _require_small(content: bytes) -> None:
    """Raise if loading a pickle could take too much memory or time, or end the process."""
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has {len(content):,} bytes")
    names = Counter[str]()
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        # The unpickler allocates memory for all memo numbers up to the one used.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and (argument or 0) > number:
            raise ValueError(f"it numbers its values up to {argument:,}")
        names[operation.name] += 1
    is_nested = sum(names[name] for name in _TUPLES) > _MAX_TUPLES or names.keys() & _NESTING
    if is_nested or sum(names[name] for name in _REPEATING) > _MAX_REPEATED:
        raise ValueError("it holds more than numbers and names")


def read_trial_state(directory: pathlib.Path, *, trusted: bool = False) -> tuple[TrialState, bool]:
    """Return the progress of a checkpoint's trial, and whether the number of epochs is known.

    Older releases' ``workload_sequencer.pkl`` has no number of epochs; a checkpoint with neither file has no progress.
    """
    for name in (layout.TRIAL_STATE_FILE, layout.WORKLOAD_FILE):
        path = directory / name
        if path.is_file():
            values = read_pickle(path, trusted=trusted)
            return _check_state(values, path), "epochs_trained" in values
    return TrialState(), False


def read_pickle(path: pathlib.Path, *, trusted: bool = False, with_arrays: bool = False) -> dict[str, Any]:
    """Read a pickled dict of containers, numbers and strings; with ``with_arrays`` also of numpy arrays.

    Raises:
        UnsafeCheckpointError: the file refers to anything else, and is not ``trusted``.
        IncompleteCheckpointError: the file is damaged, would take too much memory or time, or holds no dict.
    """
    content = layout.read_bytes(path)
    try:
        if trusted:
            values = pickle.loads(content)
        else:
            _require_small(content)
            values = finish(_Unpickler(content, RANDOM_STATES if with_arrays else {}).load())
    except UnsafeReference as e:
        raise errors.UnsafeCheckpointError(
            f"{path} refers to {e.args[0]:.200}, so reading the file could run code. If you know where "
            "the file comes from, pass trusted=True."
        ) from e
    except Exception as e:  # unpickling damaged bytes may raise anything
        raise errors.IncompleteCheckpointError(f"{path} cannot be read and may be damaged: {e}") from e
    if not isinstance(values, dict):
        raise errors.IncompleteCheckpointError(f"{path} must hold a dict; got a {type(values).__name__}.")
    return values


def _check_state(values: dict[str, Any], path: pathlib.Path) -> TrialState:
    names = [field.name for field in dataclasses.fields(TrialState)]
    if values.keys().isdisjoint([*names, "steps_completed"]):
        raise errors.IncompleteCheckpointError(
            f"{path} must hold {', '.join(names)}; got {short_text(sorted(map(short_text, values)))}. The file is "
            "damaged, or another kind of file."
        )
    # Older releases have "steps_completed" instead, or before 0.18 "latest_batch"; their other fields are not used.
    values = {"batches_trained": values.get("steps_completed", values.get("latest_batch")), **values}
    known = {name: 0 if values.get(name) is None else values[name] for name in names}
    wrong = layout.find_wrong_counts(known)
    if wrong is not None:
        raise errors.IncompleteCheckpointError(f"{path} {wrong}.")
    return TrialState(**known)


def read_load_data(directory: pathlib.Path) -> dict[str, Any]:
    """Return how to rebuild the trial of the checkpoint in ``directory``, in the form of ``load_data.json``.

    ``trial_cls_spec`` is the trial's class as ``"module:QualName"``. Releases since 0.17.8 write ``load_data.json``;
    for older ones, the platform's download added the entries to ``metadata.json``.
    """
    path = directory / layout.LOAD_DATA_FILE
    if path.is_file():
        found = content = layout.read_json(path)
        if content.get("trial_type") == "EstimatorTrial":  # Determined writes nothing else about it
            found = content = {**layout.make_load_data(None, None, is_trainer=False), **content}
        missing = [name for name in ("hparams", "experiment_config", "trial_cls_spec") if name not in content]
        if missing:
            raise errors.IncompleteCheckpointError(
                f"{path} lacks {', '.join(missing)}; got {', '.join(sorted(content)):.300}."
            )
    else:
        path = directory / layout.METADATA_FILE
        found = layout.read_json(path) if path.is_file() else {}
        config = found.get("experiment_config")
        spec = config.get("entrypoint") if isinstance(config, dict) else None
        content = layout.make_load_data(found.get("hparams"), config, spec, is_trainer=False)
    _require_kinds(path, {**found, "trial_cls_spec": content["trial_cls_spec"]})
    return content


def _require_kinds(source: pathlib.Path, content: dict[str, Any]) -> None:
    wrong = [
        f"{name!r} must be {expected}; got a {type(content[name]).__name__}"
        for name, (kind, expected) in _KINDS.items()
        if not isinstance(content.get(name), kind)
    ]
    spec = content["trial_cls_spec"]
    if not isinstance(spec, str | None):
        wrong.append(f"the trial's class must be a string; got {spec!r:.200}")
    elif spec is not None and len(spec) > _MAX_SPEC_CHARS:
        wrong.append(f"the trial's class must be named by module:Class; got {len(spec):,} characters")
    if wrong:
        raise errors.IncompleteCheckpointError(f"{source}: {'; '.join(wrong)}.")
