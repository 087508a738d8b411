"""The same trial on the real Determined and on det_lightning, with everything that can be seen written down."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from det_lightning.ranks.topology import free_port
from tests.conformance.trials import Trial, callback, of_side

if importlib.util.find_spec("determined") is None:
    pytest.skip("the real determined is not installed; run tox -e conformance", allow_module_level=True)

SIDES = ("determined", "det_lightning")


@dataclasses.dataclass
class Trace:
    """What happened in one run, in comparable form.

    Attributes:
        events: hooks of the recording callback and steps of the trial, in order, with their arguments.
        final: weights, optimizer and scheduler state, random state at the end.
        checkpoints: for each checkpoint, in order of writing: keys and contents.
    """

    events: list[Any] = dataclasses.field(default_factory=list)
    final: dict[str, Any] = dataclasses.field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def named(self, event: str) -> list[Any]:
        return [entry for entry in self.events if entry[0] == event]


@contextlib.contextmanager
def own_ports(context_class: type, agree: Callable[[Any], Any]) -> Iterator[None]:
    """Let the contexts that are made in here meet at free ports.

    The real one's sockets are closed in the background, so that its fixed ports may still be taken when the next one
    needs them; and it reads the environment variables that name them only when it is imported.

    Args:
        context_class: ``DistributedContext`` of either side.
        agree: gives all ranks the chief's object.
    """
    ports = agree({"pub_port": free_port(), "pull_port": free_port()})
    with mock.patch.dict(vars(context_class)["__init__"].__kwdefaults__, ports):
        yield


def frozen(value: Any) -> Any:
    """Turn a value into something that compares equal only to a value of the same type, dtype and bits."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.detach().cpu().numpy().tobytes().hex())
    if isinstance(value, np.ndarray | np.generic):
        return (type(value).__name__, str(value.dtype), value.shape, value.tobytes().hex())
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(frozen(item) for item in value)]
    if isinstance(value, float):
        return ("float", value.hex())
    return value


def generators() -> Any:
    """Return the states of the global random generators."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return frozen([torch.get_rng_state(), np.random.get_state(), random.getstate(), *devices])


def moment(context: Any) -> tuple[Any, ...]:
    """Return what a callback can see around it: the current batch, modes, and the random generators as a number."""
    batch_idx = None
    with contextlib.suppress(Exception):  # before the first batch
        batch_idx = context.current_train_batch()
    modes = [torch.is_grad_enabled(), *(model.training for model in context.models)]
    return batch_idx, modes, zlib.crc32(repr(generators()).encode())


#: The hooks of Determined 0.38, with what is written down of their arguments.
HOOKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "on_trial_startup": lambda first_batch_idx, checkpoint_uuid: (first_batch_idx, checkpoint_uuid is not None),
    **dict.fromkeys(["on_training_epoch_start", "on_training_epoch_end"], lambda epoch_idx: (epoch_idx,)),
    "on_training_workload_end": lambda avg_metrics, batch_metrics: (frozen(avg_metrics), frozen(batch_metrics)),
    "on_validation_epoch_end": lambda outputs: (frozen(outputs),),
    "on_validation_end": lambda metrics: (frozen(metrics),),
    **dict.fromkeys(["on_checkpoint_save_start", "on_checkpoint_load_start"], lambda checkpoint: (sorted(checkpoint),)),
    "on_checkpoint_write_end": lambda checkpoint_dir: (sorted(_files_of_determined(checkpoint_dir)),),
    "on_checkpoint_upload_end": lambda uuid: (),
    **dict.fromkeys(
        ["on_trial_shutdown", "on_training_start", "on_validation_start", "on_validation_epoch_start"], lambda: ()
    ),
}


def recording_callback(api: Any, trace: Trace, context: Any = None) -> Any:
    """Return a callback that writes down the call of every hook and, with a context, the moment."""

    def recording(hook: str, facts: Callable[..., tuple[Any, ...]]) -> Callable[..., None]:
        def method(*args: Any, **kwargs: Any) -> None:
            trace.events.append((hook, *facts(*args, **kwargs)))
            if hook == "on_checkpoint_write_end":
                trace.checkpoints.append(_read_checkpoint(Path(*args, **kwargs)))
            if context is not None:
                trace.events.append(("moment", hook, *moment(context)))

        return method

    return callback(
        api,
        state_dict=lambda: {"events": len(trace.events)},
        load_state_dict=lambda state_dict: trace.events.append(("load_state_dict", sorted(state_dict))),
        **{hook: recording(hook, facts) for hook, facts in HOOKS.items()},
    )


def _files_of_determined(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir() if path.name != "resume.pth"}


def _read_checkpoint(directory: Path) -> dict[str, Any]:
    state = torch.load(directory / "state_dict.pth", weights_only=False)
    # Knowingly different: a list there is read by torch.load() as it is; numpy takes both.
    name, words, *rest = state["rng_state"]["np_rng_state"]
    state["rng_state"]["np_rng_state"] = (name, np.asarray(words, np.uint32), *rest)
    return {
        "keys": list(state),
        "rng_keys": list(state["rng_state"]),
        "state": {key: frozen(value) for key, value in state.items() if key != "callbacks"},
        "trial_state": pickle.loads((directory / "trial_state.pkl").read_bytes()),
        "load_data": {**json.loads((directory / "load_data.json").read_text()), "trial_cls_spec": None},
    }


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def recorded(trial: type[Trial], api: Any, trace: Trace) -> type:
    """Return the trial's class with its training steps written down and the recording callback put first."""

    class Recorded(of_side(api, trial)):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            rates = [g["lr"] for optimizer in self.context.optimizers for g in optimizer.param_groups]
            trace.events.append(("train_batch", epoch_idx, batch_idx, frozen(batch), frozen(rates)))
            return super().train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)

        def build_callbacks(self) -> dict[str, Any]:
            return {"recorder": recording_callback(api, trace, self.context), **super().build_callbacks()}

    return Recorded


@contextlib.contextmanager
def loading_as_before_torch_2_6(side: str) -> Iterator[None]:
    """Determined 0.38.1 can load its own checkpoints only with the default that torch had then."""
    load = torch.load
    patched = lambda *args, **kwargs: load(*args, **{"weights_only": False, **kwargs})  # noqa: E731
    with mock.patch("torch.load", patched) if side == "determined" else contextlib.nullcontext():
        yield


def load_trial(side: str, directory: Path, **arguments: Any) -> Any:
    """Load a trial from a checkpoint with the function of a side."""
    with loading_as_before_torch_2_6(side):
        load: Any = importlib.import_module(f"{side}.pytorch").load_trial_from_checkpoint_path
        return load(str(directory), **arguments)


def epoch(value: Any) -> Callable[[Any], Any]:
    """Return what :func:`run` takes for a number of epochs."""
    return lambda api: api.Epoch(value)


def run(
    side: str, trial_class: type[Trial], init: dict[str, Any] | None = None, trial_seed: int = 7, **fit: Any
) -> Trace:
    """Train the trial on one side, with Determined's own Trainer, and return what happened.

    The length and the periods in ``fit`` are numbers of batches, or functions of the API module, such as ``epoch(1)``.
    """
    api = importlib.import_module(f"{side}.pytorch")
    trace = Trace()
    recording = recorded(trial_class, api, trace)
    units = {name: value for name, value in fit.items() if name.endswith(("_length", "_period")) and value is not None}
    fit |= {name: value(api) if callable(value) else api.Batch(value) for name, value in units.items()}
    quiet = {} if side == "determined" else {"enable_progress_bar": False}
    seed(trial_seed)
    with (
        loading_as_before_torch_2_6(side),
        api.init(**{"enable_tensorboard_logging": False, **(init or {})}) as context,
    ):
        trial = recording(context)
        try:
            api.Trainer(trial, context, **quiet).fit(**fit)
        finally:
            trace.final = {
                "weights": frozen([model.state_dict() for model in context.models]),
                "optimizers": frozen([optimizer.state_dict() for optimizer in context.optimizers]),
                "schedulers": frozen([scheduler.state_dict() for scheduler in context.lr_schedulers]),
                "rng": generators(),
            }
    return trace


def assert_same(real: Trace, ours: Trace) -> None:
    """Compare two runs exactly; the first difference is named."""
    for index, (theirs, mine) in enumerate(zip(real.events, ours.events, strict=False)):
        assert mine == theirs, f"event {index}: det_lightning {mine} != determined {theirs}"
    assert len(ours.events) == len(real.events), (ours.events[-3:], real.events[-3:])
    for what, value in real.final.items():
        assert ours.final[what] == value, f"{what} at the end"
    for index, (theirs, mine) in enumerate(zip(real.checkpoints, ours.checkpoints, strict=True)):
        for what, value in theirs.items():
            assert mine[what] == value, f"{what} of checkpoint {index}"


def compare(trial: type[Trial], **run_arguments: Any) -> Trace:
    """Run both sides, assert that they are the same, and return the trace for more to be said of it."""
    real, ours = (run(side, trial, **run_arguments) for side in SIDES)
    assert_same(real, ours)
    return ours


def raises_alike(trial: type[Trial], match: str, **run_arguments: Any) -> None:
    """Assert that both sides raise, and that ours names the culprit with an error of the same name or base."""
    run_arguments = {"max_length": 3, **run_arguments}
    with pytest.raises(BaseException) as real:
        run("determined", trial, **run_arguments)
    with pytest.raises(BaseException, match=match) as ours:
        run("det_lightning", trial, **run_arguments)
    alike = {real.type.__name__, *(base.__name__ for base in real.type.__mro__ if base.__module__ == "builtins")}
    alike -= {"object", "BaseException", "Exception"} if real.type.__module__ != "builtins" else {"object"}
    assert {base.__name__ for base in ours.type.__mro__} & alike, (real.type, ours.type)


def outcome(action: Callable[[], Any]) -> Any:
    """Return the result of a call, or the name of the error."""
    try:
        return action()
    except Exception as error:
        return type(error).__name__


def as_unit(value: Any) -> Any:
    """Return what :func:`run` takes for a unit of training that was passed through JSON: ``["Batch", 4]``."""
    return (lambda api: getattr(api, value[0])(value[1])) if isinstance(value, list) else value
