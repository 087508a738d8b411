"""The recorder's log in this process, which keeps more than a record holds: values, tensors, and state of objects."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from det_lightning import pytorch
from det_lightning.pytorch._random_state import capture_rng
from det_lightning.pytorch._weights import collect_rest, collect_weights
from det_lightning.testing import recorder
from det_lightning.testing.observation.attribute_access import AttributeAccess
from det_lightning.testing.observation.object_state import ObjectState, StateReader

# They run when the content of a checkpoint is complete.
_LATE_HOOKS = ("on_checkpoint_end", "on_checkpoint_write_end", "on_checkpoint_upload_end")
_RANDOM_STATES = {"cpu_rng_state": "torch", "np_rng_state": "numpy", "random_rng_state": "Python"}


class Observer(recorder.TrainingLog):
    """Observes one training.

    Args:
        reader: reads the state of the trial's objects at the start, at each checkpoint and at the end; None for never.
        access: notes which attributes are read before they are written; None to note nothing.
        keeps_parameters: keep a copy of the parameters before training, and the samples of the first batch.
    """

    def __init__(
        self, reader: StateReader | None = None, access: AttributeAccess | None = None, keeps_parameters: bool = False
    ) -> None:
        super().__init__()
        self.access = access
        self.trial: Any = None  # of the run, as long as it goes on
        self.context: Any = None
        self.epoch_length: int | None = None  # batches of the training loader, if it has a length
        self.metrics: list[dict[str, Any]] = []  # of each batch, as numpy values
        #: Number of batches trained and metrics of each validation, as the trial's callbacks left them.
        self.validations: list[tuple[int, dict[str, Any]]] = []
        self.trainable: dict[str, bool] = {}  # whether a wrapped optimizer has a parameter that wants a gradient
        self.with_gradient: set[str] = set()  # the parameters that got one
        self.weights_before: list[dict[str, Any]] = []  # descriptions before each batch
        self.late_hooks: dict[str, list[str]] = {}  # of each callback, run when the content of a checkpoint is complete
        self.states: dict[str | int, ObjectState] = {}  # at the "start", the "end", and by batches at each checkpoint
        self.loaded: dict[str, Any] = {}  # description of what a checkpoint would hold before the first batch
        self.final: dict[str, Any] = {}  # weights and states at the end
        self.initial_parameters: dict[str, torch.Tensor] = {}  # copies, if wanted
        self.samples: collections.Counter[bytes] = collections.Counter()  # the rows of the first batch, if wanted
        self._reader = reader
        self._keeps_parameters = keeps_parameters

    def hook(self, name: str, arguments: dict[str, Any], given: Any) -> None:
        """Record that a hook of the callbacks is called, and what is there at that time."""
        super().hook(name, arguments, given)
        if name == "on_training_start":
            self._begin_training()
        elif name == "on_checkpoint_save_start":
            self._read_state(self.batches)
        elif name == "on_trial_shutdown":
            self._read_state("end")

    def watch_callbacks(self) -> None:
        """Watch the trial and its callbacks, which are all built."""
        self.late_hooks = {name: _late_hooks_of(callback) for name, callback in self.callbacks.items()}
        if self.access is not None:
            for name, callback in self.callbacks.items():
                self.access.watch(callback, f"callback {name!r}")
            self.access.watch(self.trial, "trial")

    def _begin_training(self) -> None:
        optimized = {id(p) for o in self.context.optimizers for group in o.param_groups for p in group["params"]}
        for prefix, model in recorder.named_models(self.trial).items():
            for name, parameter in model.named_parameters():
                if not recorder.is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf:
                    self._watch_parameter(f"{prefix}.{name}", parameter, id(parameter) in optimized)
        if self._reader is not None:
            content = {**collect_weights(self.context), **collect_rest(self.context, self.callbacks, {})}
            self.loaded = recorder.describe(content)
        self._read_state("start")
        if self.access is not None:
            self.access.active = True

    def _watch_parameter(self, name: str, parameter: torch.Tensor, optimized: bool) -> None:
        self.trainable[name] = optimized
        if self._keeps_parameters:
            self.initial_parameters[name] = parameter.detach().cpu().clone()
        parameter.register_post_accumulate_grad_hook(lambda _: self.with_gradient.add(name))  # type: ignore[no-untyped-call]

    def _read_state(self, key: str | int) -> None:
        if self._reader is not None:
            self.states[key] = self._reader.read(self.trial, self.context, self.callbacks)

    def batch_start(self, trial: Any, batch: Any, epoch: Any) -> None:
        """Record what a batch is trained with."""
        last = self.events[-1]
        # Callbacks may have changed weights since the batch before.
        self.weights_before.append(last["weights"] if last["event"] == "batch_end" else self.weights(trial))
        if self._keeps_parameters and not self.samples:
            apply_to_collection(batch, (torch.Tensor, np.ndarray), self._count_samples)
        super().batch_start(trial, batch, epoch)

    def _count_samples(self, value: Any) -> None:
        array = _frozen(value)
        if array.ndim:
            self.samples.update(row.tobytes() for row in array)

    def batch_end(self, trial: Any, metrics: Any) -> None:
        """Record what came of a batch."""
        named = metrics if isinstance(metrics, dict) else {"loss": metrics}
        self.metrics.append({str(name): _frozen(value) for name, value in named.items()})
        super().batch_end(trial, metrics)

    def validated(self, metrics: dict[str, Any]) -> None:
        """Record the metrics of a validation as the trial's callbacks left them."""
        self.validations.append((self.batches, {str(name): _frozen(value) for name, value in metrics.items()}))
        event = next(event for event in reversed(self.events) if event["event"] == "validation")
        event["reported"] = recorder.describe(metrics)  # the recorder alone sees what there was before the callbacks

    def end(self, trial: Any) -> None:
        """Record what a training leaves behind."""
        super().end(trial)
        optimizers = [optimizer.state_dict() for optimizer in self.context.optimizers]
        schedulers = [scheduler.state_dict() for scheduler in self.context.lr_schedulers]
        self.events[-1].update(optimizers=recorder.describe(optimizers), schedulers=recorder.describe(schedulers))
        random_state = capture_rng()
        self.final = {
            "weights": {
                f"{prefix}.{name}": tensor.detach().cpu().clone()
                for prefix, model in recorder.named_models(trial).items()
                for name, tensor in model.state_dict().items()
                if isinstance(tensor, torch.Tensor)
            },
            "optimizer": optimizers,
            "scheduler": schedulers,
            "callback": {name: callback.state_dict() for name, callback in self.callbacks.items()},
            "random state": {title: random_state[name] for name, title in _RANDOM_STATES.items()},
        }

    def release(self) -> None:
        """Let go of the trial, which may hold much."""
        self.trial = None
        self.context = None
        self.callbacks = {}


def _late_hooks_of(callback: Any) -> list[str]:
    own = [of for of in type(callback).__mro__ if not of.__module__.startswith("det_lightning")]
    return [hook for hook in _LATE_HOOKS if any(hook in vars(of) for of in own)]


def _frozen(value: Any) -> Any:
    """Return a copy of a metric, or of what is nested in it, that later changes do not reach."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).resolve_conj().clone().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return np.array(value)
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_frozen(item) for item in value]
    return value


class _LastCallback(pytorch.PyTorchCallback):
    """Is called for a validation after the trial's own callbacks, which may change its metrics."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._observer.validated(metrics)


def observed(trial_class: type, observer: Observer) -> type:
    """Return ``trial_class`` with all that it does shown to ``observer``; it has the same name."""
    recorded: Any = recorder.recorded(trial_class, pytorch, observer)

    def build(self: Any, context: Any, *args: Any, **kwargs: Any) -> None:
        observer.trial = self
        observer.context = context
        recorded.__init__(self, context, *args, **kwargs)

    def build_callbacks(self: Any) -> Any:
        callbacks = recorded.build_callbacks(self)
        if not isinstance(callbacks, dict):
            return callbacks
        observer.watch_callbacks()
        return {**callbacks, "det_lightning_observer": _LastCallback(observer)}

    def build_training_data_loader(self: Any) -> Any:
        loader = recorded.build_training_data_loader(self)
        with contextlib.suppress(TypeError):
            observer.epoch_length = len(loader)
        return loader

    methods = {
        "__init__": build,
        "build_callbacks": build_callbacks,
        "build_training_data_loader": build_training_data_loader,
    }
    made: type = recorder.named_like(trial_class, type(trial_class.__name__, (recorded,), methods))
    return made
