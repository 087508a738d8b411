"""What is written down of one run: what the trial returns, what its callbacks are told, what becomes of its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from typing import Any

import numpy as np
import torch

from det_lightning.pytorch.backend import DDP_PREFIX
from det_lightning.pytorch.weights import collect_rest, collect_weights
from det_lightning.testing.observation.attribute_access import ReadingOrder
from det_lightning.testing.observation.digests import (
    Fingerprint,
    arrays_in,
    fingerprint,
    flat,
    frozen,
    nested_fingerprint,
)
from det_lightning.testing.observation.object_state import ObjectState, StateReader

__all__ = ["CHECKPOINTED", "Happening", "Observer"]

#: The event that ends the making of a checkpoint.
CHECKPOINTED = "on_checkpoint_upload_end"
_LATE_HOOKS = ("on_checkpoint_end", "on_checkpoint_write_end", "on_checkpoint_upload_end")


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
        begun_with: the weights that batches began with, where something else came before.
        states: the state of the objects: ``"start"``, ``"end"``, and by number of batches at each checkpoint.
        loaded: what a checkpoint would hold before the first batch.
        parts: the keys of a checkpoint, without those that callbacks add to it.
        late_hooks: what each callback defines that runs when the content of a checkpoint is complete.
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
        self.late_hooks: dict[str, list[str]] = {}
        self.initial: dict[str, Fingerprint] = {}
        self.begun_with: dict[int, dict[str, Fingerprint]] = {}
        self.gradients: set[str] = set()
        self.trainable: dict[str, bool] = {}
        self.begun = False
        self.epoch_length: int | None = None
        self.states: dict[str | int, ObjectState] = {}
        self.loaded: dict[str, Any] = {}
        self.parts: set[str] = set()
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

    def take_callbacks(self, callbacks: Any) -> None:
        """Take the trial's callbacks, a dict of them if all is well."""
        self.stage = "before its data loaders are built"
        if not isinstance(callbacks, dict):
            return
        self.callbacks = callbacks
        self.late_hooks = {name: _late_hooks_of(callback) for name, callback in callbacks.items()}
        if self.order is not None:
            for name, callback in callbacks.items():
                self.order.watch(callback, f"callback {name!r}")
            self.order.watch(self.trial, "trial")

    def note_length(self, loader: Any) -> None:
        """Note the number of batches of the training loader."""
        with contextlib.suppress(TypeError):
            self.epoch_length = len(loader)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Note what the optimizers are set to before a batch, and the weights where callbacks may have changed them."""
        self._note_weights()
        if self.happenings and self.happenings[-1].what != "batch":
            self.begun_with[batch_idx] = self.weights()
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
            self.loaded, self.parts = dict(flat(content)), set(content)
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
            f"{name}.{of_parameter.removeprefix(DDP_PREFIX)}": parameter
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
            f"{name}.{of_tensor.removeprefix(DDP_PREFIX)}": fingerprint(tensor)
            for name, model in self.models().items()
            for of_tensor, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }

    def _note_weights(self) -> None:
        """Add to a batch what it left of the weights, when the loop has done all that it does for a batch."""
        last = self.happenings[-1] if self.happenings else None
        if last is not None and last.what == "batch" and last.batches + 1 == self.batches:
            last.values.update({("weights", name): value for name, value in self.weights().items()})


def _late_hooks_of(callback: Any) -> list[str]:
    own = [of for of in type(callback).__mro__ if not of.__module__.startswith("det_lightning")]
    return [hook for hook in _LATE_HOOKS if any(hook in vars(of) for of in own)]
