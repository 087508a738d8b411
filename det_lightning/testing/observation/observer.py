"""The observer of a training in this process: weights, gradients, samples, states of objects, loaders."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection

from det_lightning import pytorch
from det_lightning.pytorch._random_state import capture_rng, restore_rng
from det_lightning.pytorch._weights import collect_rest, collect_weights
from det_lightning.testing import recorder
from det_lightning.testing.observation.model_watch import EvaluationWatch
from det_lightning.testing.observation.object_state import ObjectState, read_state
from det_lightning.testing.observation.shortened_data import LoaderFacts, ShortenedData

_KEPT_ELEMENTS = 1000
_RANDOM_STATES = {"cpu_rng_state": "torch", "np_rng_state": "numpy", "random_rng_state": "Python"}


class AttributeAccess:
    """Notes, while :attr:`active`, the attributes whose old value matters: a read comes before the first write."""

    def __init__(self) -> None:
        self.active = False
        self._watched: set[str] = set()  # labels
        self._first: dict[tuple[str, str], str] = {}  # "read" or "write", by label and attribute

    def watch(self, watched: Any, label: str) -> None:
        """Watch an object; if the class of the object cannot be replaced, all attributes count as read."""
        of: Any = type(watched)

        def note(other: Any, name: str, access: str) -> None:
            if self.active and other is watched:  # the object may make other objects of its class
                self._first.setdefault((label, name), access)

        with contextlib.suppress(TypeError):

            class Noting(of):  # type: ignore[misc]
                def __getattribute__(self, name: str) -> Any:
                    note(self, name, "read")
                    return super().__getattribute__(name)

                def __setattr__(self, name: str, value: Any) -> None:
                    note(self, name, "write")
                    super().__setattr__(name, value)

            watched.__class__ = recorder.name_like(of, Noting)
            self._watched.add(label)

    def is_read_first(self, label: str, attribute: str) -> bool:
        """Return whether the old value of an attribute was, or may have been, read."""
        return label not in self._watched or self._first.get((label, attribute)) == "read"


class Observer(recorder.TrainingLog):
    """Observes a training; with ``modules``, a function for the trial's modules, also the state of objects."""

    def __init__(
        self,
        modules: Callable[[], list[ModuleType]] | None = None,
        watches: bool = False,
        keeps_weights: bool = False,
        evaluation: EvaluationWatch | None = None,
        indices: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        self.access = AttributeAccess()  # to the trial and its callbacks, if it is watched
        self.evaluation = evaluation or EvaluationWatch()
        self.indices = indices  # what train_batch() is told in place of the indices of epoch and batch
        self.data: dict[str, Any] = {}  # the datasets and samplers of the loaders
        self.training = LoaderFacts()  # before the loader is shortened
        self.validation = LoaderFacts()  # after the loader is shortened
        self.metrics: list[dict[str, Any]] = []  # of each batch, as numpy values
        self.validations: list[tuple[int, dict[str, Any]]] = []  # batches trained, and metrics as callbacks left them
        self.trainable: dict[str, bool] = {}  # by parameter, whether a wrapped optimizer has it
        self.with_gradient: set[str] = set()  # the parameters that got a gradient
        self.weights_before: list[dict[str, Any]] = []  # descriptions before each batch
        self.states: dict[str | int, ObjectState] = {}  # at the "start", the "end", and by batches at each checkpoint
        self.loaded: dict[str, Any] = {}  # the content of a checkpoint before the first batch, described
        self.final: dict[str, Any] = {}  # weights and states at the end
        self.initial_parameters: dict[str, torch.Tensor] = {}  # copies, if kept
        self.samples: list[collections.Counter[bytes] | None] = []  # of each batch, if kept: checksums of its rows
        self.lengths: list[int] = []  # of each batch, if kept
        self.gradients: dict[str, np.ndarray[Any, Any]] = {}  # elements of those of the first update, if kept
        self._before_validation: dict[str, Any] | None = None  # random states, if it is before the first batch
        self._modules = modules
        self.watches = watches  # whether to note accesses to attributes
        self._keeps_weights = keeps_weights

    def begin(self, trial: Any, context: Any) -> None:
        super().begin(trial, context)
        self._of_context = frozenset(vars(context))

    def hook(self, name: str, arguments: dict[str, Any], given: Any) -> None:
        super().hook(name, arguments, given)
        if name == "on_training_start":
            self._start_training()
        elif name == "on_validation_start" and self.context.position.batch_idx is None:
            # A trial may ask for the index of a batch, and usually validates after training.
            self.context.position.batch_idx = 0
            self._before_validation = capture_rng()
        elif name == "on_checkpoint_save_start":
            self._read_state(self.batches)
        elif name == "on_trial_shutdown":
            self._read_state("end")

    def watch_callbacks(self) -> None:
        for name, callback in self.callbacks.items():
            self.access.watch(callback, f"callback {name!r}")
        self.access.watch(self.trial, "trial")

    def _start_training(self) -> None:
        optimized = {id(p) for o in self.context.optimizers for group in o.param_groups for p in group["params"]}
        for name, parameter in self._parameters():
            if not recorder.is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf:
                self.trainable[name] = id(parameter) in optimized
                if self._keeps_weights:
                    self.initial_parameters[name] = parameter.detach().cpu().clone()
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.with_gradient.add(name))
        if self._modules is not None:
            content = {**collect_weights(self.context), **collect_rest(self.context, self.callbacks, {})}
            self.loaded = recorder.describe(content)
        self._read_state("start")
        self.access.active = True

    def _read_state(self, key: str | int) -> None:
        if self._modules is not None:
            added = {name: value for name, value in vars(self.context).items() if name not in self._of_context}
            parts = {**self.data, "the context": SimpleNamespace(**added)}
            self.states[key] = read_state(self._modules(), self.trial, self.context, self.callbacks, parts)

    def batch_start(self, trial: Any, batch: Any, epoch: Any) -> None:
        last = self.events[-1]
        # Callbacks may have changed weights since the batch before.
        self.weights_before.append(last["weights"] if last["event"] == "batch_end" else self.weights(trial))
        if self._keeps_weights:
            self._count_samples(trial, batch)
        super().batch_start(trial, batch, epoch)

    def _count_samples(self, trial: Any, batch: Any) -> None:
        values: list[Any] = []
        apply_to_collection(batch, (torch.Tensor, np.ndarray), values.append)
        arrays = [array for array in map(_copy, values) if array.ndim]
        length = len(arrays[0]) if arrays else 0
        with contextlib.suppress(TypeError, ValueError):  # get_batch_length() does not know this type of batch
            length = trial.get_batch_length(batch) if arrays else 0
        self.lengths.append(length)
        rows = (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for array in arrays for row in array)
        self.samples.append(collections.Counter(rows) if all(len(array) == length for array in arrays) else None)

    def end_validation(self, metrics: dict[str, Any]) -> None:
        """Record the metrics of a validation, after all hooks."""
        self.validations.append((self.batches, metrics))
        if self._before_validation is not None:
            self.context.position.batch_idx = None
            restore_rng(self._before_validation)
            self._before_validation = None

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for prefix, model in recorder.find_models(self.trial).items():
            yield from model.named_parameters(prefix)

    def keep_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep elements of the gradients of the first batch, just before their optimizer steps."""
        if self.batches or self.context is None:
            return
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for name, parameter in self._parameters():
            if id(parameter) in parameters and not parameter.grad.is_sparse:
                elements = parameter.grad.detach().double().cpu().flatten()
                self.gradients[name] = elements[:: max(1, len(elements) // _KEPT_ELEMENTS)].numpy().copy()

    def batch_end(self, trial: Any, metrics: Any) -> None:
        named = metrics if isinstance(metrics, dict) else {"loss": metrics}
        self.metrics.append({str(name): _copy(value) for name, value in named.items()})
        super().batch_end(trial, metrics)

    def end(self, trial: Any) -> None:
        super().end(trial)
        optimizers = [optimizer.state_dict() for optimizer in self.context.optimizers]
        schedulers = [scheduler.state_dict() for scheduler in self.context.lr_schedulers]
        self.events[-1].update(optimizers=recorder.describe(optimizers), schedulers=recorder.describe(schedulers))
        random_state = capture_rng()
        self.final = {
            "weights": {
                f"{prefix}.{name}": tensor.detach().cpu().clone()
                for prefix, model in recorder.find_models(trial).items()
                for name, tensor in model.state_dict().items()
                if isinstance(tensor, torch.Tensor) and not recorder.is_lazy(tensor)
            },
            "optimizer": optimizers,
            "scheduler": schedulers,
            "callback": {name: callback.state_dict() for name, callback in self.callbacks.items()},
            "random state": {title: random_state[name] for name, title in _RANDOM_STATES.items()},
        }

    def release(self) -> None:
        """Drop the references to the trial, which may be large."""
        self.trial = None
        self.context = None
        self.callbacks = {}


def _copy(value: Any) -> Any:
    """Return a copy of a metric, nested or not, that later changes do not affect."""
    array, _ = recorder.as_array(value)
    if array is not None:
        return np.array(array)
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def observe_trial(trial_class: type, observer: Observer, data: ShortenedData) -> type:
    """Return a subclass of ``trial_class``, with the same name, for ``observer`` to observe on shortened ``data``."""
    recorded: Any = recorder.record_trial(trial_class, pytorch, observer)

    class LastCallback(pytorch.PyTorchCallback):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            """Record the metrics after the trial's callbacks, which run before and may change the metrics."""
            named = {str(name): _copy(value) for name, value in metrics.items()}
            observer.end_validation(named)
            validation = next(event for event in reversed(observer.events) if event["event"] == "validation")
            validation["reported"] = recorder.describe(metrics)

    class Observed(recorded):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if observer.indices:
                epoch_idx, batch_idx = observer.indices[batch_idx]
            return super().train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)

        def build_callbacks(self) -> Any:
            callbacks = super().build_callbacks()
            if not isinstance(callbacks, dict):
                return callbacks
            if observer.watches:
                observer.watch_callbacks()
            return {**callbacks, "det_lightning_observer": LastCallback()}

        def build_training_data_loader(self, *args: Any, **kwargs: Any) -> Any:
            loader = super().build_training_data_loader(*args, **kwargs)
            if args or kwargs:  # the trial itself asks, for another purpose
                return loader
            observer.training = LoaderFacts.read(loader)
            observer.data |= _name_data("training", loader)
            return data.shorten_training(loader)

        def build_validation_data_loader(self, *args: Any, **kwargs: Any) -> Any:
            loader = super().build_validation_data_loader(*args, **kwargs)
            if args or kwargs:
                return loader
            loader = data.shorten_validation(loader)
            observer.validation = LoaderFacts.read(loader)
            observer.data |= _name_data("validation", loader)
            return loader

    for method in ("evaluate_batch", "evaluate_full_dataset"):
        if getattr(trial_class, method, None) is not getattr(pytorch.PyTorchTrial, method):
            setattr(Observed, method, _watch_evaluation(getattr(recorded, method), observer))
    return recorder.name_like(trial_class, Observed)


def _watch_evaluation(method: Any, observer: Observer) -> Any:
    @functools.wraps(method)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with observer.evaluation.around(observer, method.__name__):
            return method(*args, **kwargs)

    # The training loop passes the arguments that the method has.
    evaluate.__signature__ = inspect.signature(method, follow_wrapped=False)  # type: ignore[attr-defined]
    return evaluate


def _name_data(purpose: str, loader: Any) -> dict[str, Any]:
    parts = {part: getattr(loader, part, None) for part in ("dataset", "sampler", "batch_sampler")}
    return {f"the {purpose} {part.replace('_', ' ')}": value for part, value in parts.items() if value is not None}
