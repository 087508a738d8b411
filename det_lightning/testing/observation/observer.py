"""Observes a run for the checks: calls, weights, gradients, modes, samples, states of objects, in plain values."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from det_lightning import pytorch
from det_lightning.pytorch._random_state import capture_rng, isolated_rng, restore_rng
from det_lightning.pytorch._weights import collect_rest, collect_weights
from det_lightning.testing import recorder
from det_lightning.testing.observation.object_state import ObjectState, read_state
from det_lightning.testing.observation.shortened_data import LoaderFacts, ShortenedData
from det_lightning.testing.training.trial_source import TrialSource

_KEPT_ELEMENTS = 1000
# The number of evaluations in which to look at layers and modes.
_WATCHED_EVALUATIONS = 3
# Before which hooks to keep the weights.
_MOMENTS = {
    "on_validation_start": "start",
    "on_validation_epoch_end": "evaluated",
    "on_validation_end": "evaluated",
}
_RANDOM_STATES = {"cpu_rng_state": "torch", "np_rng_state": "numpy", "random_rng_state": "Python"}


class AttributeAccess:
    """Notes, while :attr:`active`, the attributes whose old value matters: they are read before they are written."""

    def __init__(self) -> None:
        self.active = False
        self._watched: set[str] = set()  # labels
        self._first: dict[tuple[str, str], str] = {}  # "read" or "write", by label and attribute

    def watch(self, watched: Any, label: str) -> None:
        """Watch an object; if its class cannot be replaced, all its attributes count as read."""
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


@dataclasses.dataclass
class BatchModes:
    """The modes of dropouts and the like around a batch, by module."""

    start: dict[str, str | None]  # None for training mode, else the user's line that left evaluation mode on, if known
    end: dict[str, str | None] = dataclasses.field(default_factory=dict)
    chosen: set[str] = dataclasses.field(default_factory=set)  # modules that the trial switches before their first call
    entered: dict[str, bool] = dataclasses.field(default_factory=dict)  # whether the first call is in training mode


class Observer(recorder.TrainingLog):
    """The record of one run; with a ``source`` also of the trial's calls, on request of the state of its objects."""

    def __init__(
        self,
        source: TrialSource | None = None,
        reads_state: bool = False,
        watches: bool = False,
        keeps_weights: bool = False,
        indices: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        self.source = source
        self.access = AttributeAccess()  # to the trial and its callbacks, if it is watched
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
        # The trial's calls, each with its line, and the batches of the calls, by kind.
        self.calls: dict[str, dict[str, list[int]]] = collections.defaultdict(dict)
        self.steps: dict[int, str | None] = {}  # the batches with a step, and the user's line of a step by hand
        self.stepped: list[dict[str, float]] = []  # norms of gradients at each step, if the learning rate is above 0
        self.twice: dict[str, str] = {}  # classes of objects that the trial wraps twice, by what they are
        self.frozen: dict[str, bool] = {}  # parameters frozen after wrap_model(), and whether training had begun
        self.modes: list[BatchModes] = []  # of each batch
        self.layers: dict[str, bool] = {}  # that train in an evaluation, and whether the evaluation itself sets that
        self.switched: dict[str, str] = {}  # modules whose mode an evaluation changes, with what it does
        self.weights_around: list[dict[str, dict[str, Any]]] = []  # of each validation, by moment
        self.evaluating: str | None = None  # the method that is evaluating, while its layers are looked at
        self.evaluations = 0
        self.draws = False  # whether an evaluation draws random numbers
        self._evaluation_modes: dict[str, bool] = {}
        self._before_validation: dict[str, Any] | None = None  # random states, if it is before the first batch
        self._reads_state = reads_state
        self.watches = watches  # whether to note accesses to attributes
        self._keeps_weights = keeps_weights
        self.is_scaled = False  # whether the loss of a backward pass is scaled
        self.scaled: set[torch.Tensor] = set()  # parameters with gradients of a scaled loss, not divided by the scale
        self._free: set[torch.Tensor] = set()  # parameters without requires_grad=False when their model was wrapped
        self._reducers: list[Any] = []  # that the training loop resets
        self._modules: dict[int, tuple[str, nn.Module]] = {}  # modules that depend on their mode, by id
        self._mode_lines: dict[str, str] = {}  # the user's line that switched a module to evaluation mode

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process can unpickle: no objects of the trial's classes."""
        self.release()
        plain = {
            "metrics": [_copy_plain(metrics) for metrics in self.metrics],
            "validations": [(batches, _copy_plain(metrics)) for batches, metrics in self.validations],
            "final": {"weights": self.final.get("weights", {})},
        }
        return {**vars(self), **plain, "data": {}, "_before_validation": None}

    def begin(self, trial: Any, context: Any) -> None:
        super().begin(trial, context)
        self._of_context = frozenset(vars(context))
        self._environment = dict(os.environ)

    def hook(self, name: str, arguments: dict[str, Any], given: Any) -> None:
        super().hook(name, arguments, given)
        if name in _MOMENTS:
            self._weigh(_MOMENTS[name])
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
                parameter.register_post_accumulate_grad_hook(functools.partial(self._receive, name))
        self._find_wrapped_twice()
        if self._reads_state:
            content = {**collect_weights(self.context), **collect_rest(self.context, self.callbacks, {})}
            self.loaded = recorder.describe(content)
        self._read_state("start")
        self.access.active = True

    def _read_state(self, key: str | int) -> None:
        if self._reads_state and self.source is not None:
            added = {name: value for name, value in vars(self.context).items() if name not in self._of_context}
            set_since = {n: value for n, value in os.environ.items() if self._environment.get(n) != value}
            settings = {"the hyperparameters": self.context.settings.hparams, "the environment": set_since}
            parts = {**self.data, "the context": SimpleNamespace(**added), **settings}
            self.states[key] = read_state(
                self.source.modules(), self.trial, self.context, self.callbacks, parts, self._reducers
            )

    def batch_start(self, trial: Any, batch: Any, epoch: Any) -> None:
        last = self.events[-1]
        # Callbacks may have changed weights since the batch before.
        self.weights_before.append(last["weights"] if last["event"] == "batch_end" else self.weights(trial))
        if self._keeps_weights:
            self._count_samples(trial, batch)
        self._modules = {id(part): (name, part) for name, part in self._collect_modules() if _depends_on_mode(part)}
        self.modes.append(BatchModes(self._read_lines()))
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
        """Record the metrics of a validation, and the weights, after all hooks."""
        self._weigh("end")
        self.validations.append((self.batches, metrics))
        if self._before_validation is not None:
            self.context.position.batch_idx = None
            restore_rng(self._before_validation)
            self._before_validation = None

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for prefix, model in recorder.find_models(self.trial).items():
            yield from model.named_parameters(prefix)

    def keep_gradients(self, parameters: Set[torch.Tensor]) -> None:
        """Keep some elements of the first batch's gradients just before an optimizer of ``parameters`` steps."""
        for name, parameter in self._parameters() if self._keeps_weights and self.batches == 0 else ():
            if parameter in parameters and parameter.grad is not None and not parameter.grad.is_sparse:
                elements = parameter.grad.detach().double().cpu().flatten()
                self.gradients[name] = elements[:: max(1, len(elements) // _KEPT_ELEMENTS)].numpy().copy()

    def batch_end(self, trial: Any, metrics: Any) -> None:
        named = metrics if isinstance(metrics, dict) else {"loss": metrics}
        self.metrics.append({str(name): _copy(value) for name, value in named.items()})
        self.modes[-1].end = self._read_lines()
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
        self.trial = self.context = self.source = None
        self.callbacks = {}
        self._free = set()
        self.scaled = set()
        self._reducers = []
        self._modules = {}

    # What the watch of calls notes

    def note_call(self, kind: str, call: str) -> None:
        self.calls[kind].setdefault(call, []).append(self.batches)

    def _receive(self, name: str, parameter: torch.Tensor) -> None:
        """Note that a parameter gets a gradient, and whether of a scaled loss."""
        self.with_gradient.add(name)
        (self.scaled.add if self.is_scaled else self.scaled.discard)(parameter)

    def note_step(self, line: str | None) -> None:
        self.steps[self.batches] = self.steps.get(self.batches) or line

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the norms of the gradients with which an optimizer is about to step."""
        names = {parameter: name for name, parameter in self._parameters()}
        moving = [parameter for group in optimizer.param_groups if group.get("lr", 1) for parameter in group["params"]]
        norms = {names[p]: p.grad for p in moving if p in names and p.grad is not None and not p.grad.is_sparse}
        self.stepped.append({name: float(gradient.double().norm()) for name, gradient in norms.items()})

    def note_wrapped(self, _: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._free |= {parameter for parameter in model.parameters() if parameter.requires_grad}

    def note_reducer(self, _: Any, reducer: Any, *args: Any, **kwargs: Any) -> None:
        self._reducers.append(reducer)

    def note_frozen(self) -> None:
        """Note the parameters frozen at a backward pass but not at ``wrap_model()``, in models that still train."""
        for prefix, model in {} if self.trial is None else recorder.find_models(self.trial).items():
            parameters = dict(model.named_parameters(prefix))
            if any(parameter.requires_grad for parameter in parameters.values()):
                frozen = {n for n, parameter in parameters.items() if not parameter.requires_grad}
                self.frozen |= {n: n in self.trainable for n in frozen if parameters[n] in self._free}

    def _find_wrapped_twice(self) -> None:
        schedulers = [scheduler.scheduler for scheduler in self.context.lr_schedulers]
        wrapped = {"model": self.context.models, "optimizer": self.context.optimizers, "lr_scheduler": schedulers}
        for kind, objects in wrapped.items():
            if again := [one for number, one in enumerate(objects) if any(one is other for other in objects[:number])]:
                self.twice[kind] = type(again[0]).__name__

    def collect_trained(self) -> set[torch.Tensor]:
        """Return the parameters of wrapped models, and of modules and parameters in attributes of the trial."""
        own = vars(self.trial).values()
        modules = [*self.context.models, *(value for value in own if isinstance(value, nn.Module))]
        return {value for value in own if isinstance(value, nn.Parameter)}.union(*(m.parameters() for m in modules))

    # Modes, and evaluations

    def _collect_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, model in recorder.find_models(self.trial).items():
            yield from model.named_modules(prefix=prefix)

    def _read_lines(self) -> dict[str, str | None]:
        """Return the modes that modules are in; see :class:`BatchModes`."""
        known = self._modules.values()
        return {name: None if module.training else self._mode_lines.get(name, "") for name, module in known}

    def _is_in_batch(self) -> bool:
        return bool(self.events) and self.events[-1]["event"] == "batch_start"

    def switch(self, module: nn.Module, mode: bool, line: str) -> None:
        """Note that the user's ``line`` switches the mode of a module."""
        name, _ = self._modules.get(id(module), (None, None))
        if name is not None and self._is_in_batch() and name not in self.modes[-1].entered:
            self.modes[-1].chosen.add(name)
        if name is not None and not mode:
            self._mode_lines[name] = line

    def enter(self, module: nn.Module) -> None:
        """Note the mode of the first call of a module in a batch."""
        if id(module) in self._modules and self._is_in_batch():
            self.modes[-1].entered.setdefault(self._modules[id(module)][0], module.training)

    def note_layer(self, layer: str, is_of_training_module: bool) -> None:
        """Note a layer that works as in training in an evaluation."""
        is_chosen = is_of_training_module and not any(self._evaluation_modes.values())
        self.layers[f"{layer} works as in training in {self.evaluating}()"] = is_chosen

    @contextlib.contextmanager
    def around_evaluation(self, method: str) -> Iterator[None]:
        """Observe a call of the ``method`` of the trial, unless it is part of a batch of training."""
        if self._is_in_batch():
            yield
            return
        self.evaluations += 1
        self._weigh(method)
        undrawn = [recorder.random_states(), _states_after_iteration()]
        if self.evaluations <= _WATCHED_EVALUATIONS:
            self._evaluation_modes = {name: module.training for name, module in self._collect_modules()}
            self.evaluating = method
        try:
            yield
        finally:
            self.evaluating = None
        if self.evaluations <= _WATCHED_EVALUATIONS:
            before = self._evaluation_modes
            modes = {name: module.training for name, module in self._collect_modules()}
            if switched := [name for name, mode in modes.items() if mode != before.get(name, mode)]:
                mode = "training" if modes[switched[0]] else "evaluation"
                self.switched[switched[0]] = f"{method}() leaves {shorten_names(switched)} in {mode} mode"
        self.draws = self.draws or recorder.random_states() not in undrawn

    def _weigh(self, moment: str) -> None:
        """Keep the weights at the first occurrence of a moment in a validation."""
        if moment == "start":
            self.weights_around.append({})
        if self.weights_around:
            self.weights_around[-1].setdefault(moment, self.weights(self.trial))


def shorten_names(names: Sequence[str]) -> str:
    """Return the first name, with the number of further names."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _depends_on_mode(module: nn.Module) -> bool:
    """Return whether the forward pass of a module, for example a dropout, reads the mode."""
    # A scripted module has no forward of Python.
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    probability = getattr(module, "p", getattr(module, "dropout", None))
    is_off = isinstance(probability, int | float) and probability == 0
    return code is not None and "training" in code.co_names and not is_off


def _states_after_iteration() -> dict[str, str]:
    """Return the random states after the draw of a seed for workers at the start of a loader's iteration."""
    with isolated_rng():
        torch.empty((), dtype=torch.int64).random_()
        return recorder.random_states()


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


def _copy_plain(value: Any) -> Any:
    """Return a copy of a value with text in place of objects that need a class of the trial or of a library."""
    if isinstance(value, dict):
        return {key: _copy_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_plain(item) for item in value]
    is_plain = type(value).__module__ in ("builtins", "numpy", "datetime", "uuid")
    return value if is_plain else SimpleNamespace(text=repr(value))


def observe_trial(trial_class: type, observer: Observer, data: ShortenedData) -> type:
    """Return a subclass of ``trial_class``, with the same name, for ``observer`` to observe on shortened ``data``."""
    recorded: Any = recorder.record_trial(trial_class, pytorch, observer)

    class LastCallback(pytorch.PyTorchCallback):
        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            """Record the metrics after the trial's callbacks, which may change them."""
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
        with observer.around_evaluation(method.__name__):
            return method(*args, **kwargs)

    # The training loop passes the arguments that the method has.
    evaluate.__signature__ = inspect.signature(method, follow_wrapped=False)  # type: ignore[attr-defined]
    return evaluate


def _name_data(purpose: str, loader: Any) -> dict[str, Any]:
    parts = {part: getattr(loader, part, None) for part in ("dataset", "sampler", "batch_sampler")}
    return {f"the {purpose} {part.replace('_', ' ')}": value for part, value in parts.items() if value is not None}
