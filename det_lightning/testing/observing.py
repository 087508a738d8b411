"""Watching a trial train: what it returns, what its callbacks are told, and what becomes of its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from det_lightning.pytorch.callback import PyTorchCallback
from det_lightning.pytorch.weights import collect_rest, collect_weights
from det_lightning.testing.digests import Fingerprint, arrays_in, fingerprint, flat, frozen, nested_fingerprint
from det_lightning.testing.object_state import ObjectState, StateReader
from det_lightning.testing.reading_order import ReadingOrder

__all__ = ["Happening", "Observer", "observed"]

_FIRST, _LAST = "det_lightning.testing", "det_lightning.testing.last"
#: The event that ends the making of a checkpoint.
_DDP_PREFIX = "module."
CHECKPOINTED = "on_checkpoint_upload_end"


@dataclasses.dataclass(frozen=True)
class Happening:
    """One thing that happened in a run.

    Attributes:
        what: ``"batch"``, ``"validation"``, or the name of a callback's hook.
        batches: number of batches trained on before.
        values: what it came with, by kind and name, such as ``("metric", "loss")``.
    """

    what: str
    batches: int
    values: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where it is in the run, in words."""
        if self.what == "batch":
            return f"batch {self.batches}"
        if self.what == "validation":
            return f"the validation after {self.batches} batches"
        return f"{self.what} after {self.batches} batches"


class Observer:
    """Writes down what happens in one run.

    Args:
        reads_state: also take the state of the trial's objects at the start, at each checkpoint and at the end.
        order: notes which attributes are read before they are written; None to note nothing.
        keeps_data: keep the batches themselves, and more to compare runs of several processes by.

    Attributes:
        happenings: what happened, in order.
        stage: what is under way, for the message of an error.
        batches: number of batches trained on.
        trial, context, callbacks: of the run, once they are built.
        initial: fingerprints of all parameters and buffers before training.
        trainable: the parameters that want a gradient, and whether a wrapped optimizer has them.
        gradients: those that got one.
        begun: the trial was built and its training began.
        epoch_length: number of batches of the training loader; None if it has no length.
        states: the state of the objects: ``"start"``, ``"end"``, and by number of batches at each checkpoint.
        loaded: what a checkpoint would hold before the first batch.
        data: the arrays of each batch, where they are kept; and with them
        draws: where random numbers were drawn, in the ``"loader"`` (beyond its shuffling) or in ``"train_batch"``;
        start_weights: the parameters before training.
    """

    def __init__(
        self,
        reads_state: StateReader | None = None,
        order: ReadingOrder | None = None,
        keeps_data: bool = False,
    ) -> None:
        self.happenings: list[Happening] = []
        self.stage = "while the trial is built"
        self.batches = 0
        self.trial: Any = None
        self.context: Any = None
        self.callbacks: dict[str, Any] = {}
        self.initial: dict[str, Fingerprint] = {}
        self.gradients: set[str] = set()
        self.trainable: dict[str, bool] = {}
        self.begun = False
        self.epoch_length: int | None = None
        self.states: dict[str | int, ObjectState] = {}
        self.loaded: dict[str, Any] = {}
        self.data: list[list[Any]] = []
        self.draws: set[str] = set()
        self.start_weights: dict[str, torch.Tensor] = {}
        self._random_state: Any = None
        self.order = order
        self._reads_state = reads_state
        self._keeps_data = keeps_data

    # What the trial does

    def build(self, trial: Any, context: Any) -> None:
        """Take the trial and its context before the trial is built."""
        self.trial, self.context = trial, context

    def add_callbacks(self, callbacks: Any) -> Any:
        """Return the trial's callbacks between two of the observer's."""
        self.stage = "before its data loaders are built"
        if not isinstance(callbacks, dict):
            return callbacks
        self.callbacks = callbacks
        if self.order is not None:
            for name, callback in callbacks.items():
                self.order.watch(callback, f"callback {name!r}")
            self.order.watch(self.trial, "trial")
        return {_FIRST: _First(self), **callbacks, _LAST: _Last(self)}

    def note_length(self, loader: Any) -> None:
        """Note the number of batches of the training loader."""
        with contextlib.suppress(TypeError):
            self.epoch_length = len(loader)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Note what the optimizers are set to before a batch."""
        self._note_weights()
        self.stage = f"while it trains on batch {batch_idx}"
        if self._keeps_data:
            self.data.append(list(arrays_in(batch)))
            self._note_draws("loader", new_pass=batch_idx % self.context.position.epoch_length() == 0)
        values: dict[tuple[str, str], Any] = {("data", ""): nested_fingerprint(batch)}
        values |= {
            ("learning rate", f"of optimizer {index}" + (f", group {number}" if number else "")): frozen(group["lr"])
            for index, optimizer in enumerate(self.context.optimizers)
            for number, group in enumerate(optimizer.param_groups)
        }
        self.happenings.append(Happening("batch", batch_idx, values))

    def end_batch(self, metrics: Any, batch_idx: int) -> None:
        """Note the metrics of a batch."""
        named = metrics if isinstance(metrics, dict) else {"loss": metrics}
        self.happenings[-1].values.update({("metric", str(name)): frozen(value) for name, value in named.items()})
        self.batches = batch_idx + 1
        if self._keeps_data:
            self._note_draws("train_batch")

    def _note_draws(self, where: str, new_pass: bool = False) -> None:
        state = fingerprint(torch.get_rng_state()).digest, repr(np.random.get_state()), random.getstate()
        if self._random_state not in (None, state) and not new_pass:
            self.draws.add(where)
        self._random_state = state

    def tell(self, event: str, **values: Any) -> None:
        """Note an event of the callbacks."""
        self._note_weights()
        kinds = {("argument", name): frozen(value) for name, value in values.items()}
        self.happenings.append(Happening(event, self.batches, kinds))

    def validated(self, metrics: dict[str, Any]) -> None:
        """Note the metrics of a validation, as the trial's callbacks left them."""
        values = {("validation metric", str(name)): frozen(value) for name, value in metrics.items()}
        self.happenings.append(Happening("validation", self.batches, values))

    def release(self) -> None:
        """Let go of the trial, which may hold much."""
        self.trial = self.context = None
        self.callbacks = {}

    # State

    def begin_training(self) -> None:
        """Note the state before the first batch."""
        self.begun = True
        self.initial = self.weights()
        optimized = {id(p) for o in self.context.optimizers for group in o.param_groups for p in group["params"]}
        for name, parameter in self.parameters().items():
            if parameter.requires_grad and parameter.is_leaf:
                self.trainable[name] = id(parameter) in optimized
                if self._keeps_data:
                    self.start_weights[name] = parameter.detach().cpu().clone()
                hook = functools.partial(self._note_gradient, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if self._reads_state is not None:
            content = {**collect_weights(self.context), **collect_rest(self.context, self.callbacks, {})}
            self.loaded = dict(flat(content))
        self.read_state("start")
        if self.order is not None:
            self.order.begin()

    def _note_gradient(self, name: str, parameter: torch.Tensor) -> None:
        self.gradients.add(name)

    def read_state(self, key: str | int) -> None:
        """Take the state of the trial's objects, if that is wanted."""
        if self._reads_state is not None:
            self.states[key] = self._reads_state.read(self.trial, self.context, self.callbacks)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return all parameters of the wrapped models, by the names that the trial knows them under."""
        return {
            f"{name}.{of_parameter.removeprefix(_DDP_PREFIX)}": parameter
            for name, model in self.models().items()
            for of_parameter, parameter in model.named_parameters()
        }

    def models(self) -> dict[str, torch.nn.Module]:
        """Return the wrapped models by the names of the trial's attributes, else by their index."""
        attributes = {id(value): name for name, value in reversed(list(vars(self.trial).items()))}
        return {
            attributes.get(id(model), f"models[{index}]"): model
            for index, model in enumerate(self.context.models if self.context is not None else [])
        }

    def weights(self) -> dict[str, Fingerprint]:
        """Return the fingerprints of all parameters and buffers of the wrapped models."""
        return {
            f"{name}.{of_tensor.removeprefix(_DDP_PREFIX)}": fingerprint(tensor)
            for name, model in self.models().items()
            for of_tensor, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def _note_weights(self) -> None:
        """Add to a batch what it left of the weights, when the loop has done all that it does for a batch."""
        last = self.happenings[-1] if self.happenings else None
        if last is not None and last.what == "batch" and last.batches + 1 == self.batches:
            last.values.update({("weights", name): value for name, value in self.weights().items()})


class _First(PyTorchCallback):
    """Hears of every event before the trial's own callbacks."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self._observer.batches = first_batch_idx
        self._observer.stage = "while its data loaders are built"

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self._observer.stage = "while a checkpoint is loaded"

    def on_training_start(self) -> None:
        self._observer.begin_training()

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self._observer.tell("on_training_epoch_start", epoch_idx=epoch_idx)

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self._observer.tell("on_training_epoch_end", epoch_idx=epoch_idx)

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self._observer.tell("on_training_workload_end", avg_metrics=avg_metrics)

    def on_validation_start(self) -> None:
        self._observer.tell("on_validation_start")
        self._observer.stage = f"in the validation after {self._observer.batches} batches"

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self._observer.tell("on_checkpoint_save_start")
        self._observer.stage = f"while a checkpoint is written after {self._observer.batches} batches"
        self._observer.read_state(self._observer.batches)

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._observer.tell(CHECKPOINTED)

    def on_trial_shutdown(self) -> None:
        self._observer.read_state("end")


class _Last(PyTorchCallback):
    """Hears of a validation after the trial's own callbacks, which may change its metrics."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._observer.validated(metrics)


def observed(trial_class: type, observer: Observer) -> type:
    """Return ``trial_class`` with its steps written down; it goes by the same name."""

    def wrapped(method: str, stage: str) -> Callable[..., Any]:
        original = getattr(trial_class, method)

        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            observer.stage = stage
            loader = original(self, *args, **kwargs)
            if method == "build_training_data_loader":
                observer.note_length(loader)
            return loader

        return run

    @functools.wraps(trial_class.__init__)  # type: ignore[misc]
    def build(self: Any, context: Any, *args: Any, **kwargs: Any) -> None:
        observer.build(self, context)
        trial_class.__init__(self, context, *args, **kwargs)  # type: ignore[misc]

    @functools.wraps(trial_class.train_batch)  # type: ignore[attr-defined]
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_idx = kwargs["batch_idx"]
        observer.begin_batch(kwargs.get("batch"), batch_idx)
        metrics = trial_class.train_batch(self, *args, **kwargs)  # type: ignore[attr-defined]
        observer.end_batch(metrics, batch_idx)
        return metrics

    @functools.wraps(trial_class.build_callbacks)  # type: ignore[attr-defined]
    def build_callbacks(self: Any) -> Any:
        observer.stage = "while its callbacks are built"
        return observer.add_callbacks(trial_class.build_callbacks(self))  # type: ignore[attr-defined]

    members = {
        "__init__": build,
        "__module__": trial_class.__module__,
        "__qualname__": trial_class.__qualname__,
        "__doc__": trial_class.__doc__,
        "train_batch": train_batch,
        "build_callbacks": build_callbacks,
        "build_training_data_loader": wrapped("build_training_data_loader", "in build_training_data_loader()"),
        "build_validation_data_loader": wrapped("build_validation_data_loader", "in build_validation_data_loader()"),
    }
    return type(trial_class.__name__, (trial_class,), members)
