"""``PyTorchTrial``, the interface of a trial; building a trial, and adapting a legacy trial to this interface.

A legacy trial, of Determined before 0.12.13, wraps nothing. The trial builds one model and one optimizer, and
``train_batch`` and the evaluation methods get the model as an argument. ``train_batch`` returns the loss, and the
adapter does the backward pass and the optimizer step.
"""

from __future__ import annotations

import abc
import inspect
import pathlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.utils.data

from det_lightning.arguments import require
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import explain_texts
from det_lightning.masking import short_text
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._data import DataLoader, TorchData, data_length
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._reducer import Reducer

logger = get_logger(__name__)


class PyTorchTrial(abc.ABC):
    """Models, optimizers, data, and the training and evaluation of one batch, without a training loop.

    In a subclass, wrap models, optimizers and learning rate schedulers in ``__init__``, and implement
    :meth:`train_batch`, the two loaders, and either :meth:`evaluate_batch` or :meth:`evaluate_full_dataset`.
    The interface is the same as in Determined 0.38 (``determined.pytorch.PyTorchTrial``).

    Example:
        >>> import torch
        >>> from det_lightning import pytorch
        >>> class LineTrial(pytorch.PyTorchTrial):
        ...     def __init__(self, context):
        ...         self.context = context
        ...         self.model = context.wrap_model(torch.nn.Linear(1, 1))
        ...         self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        ...     def build_training_data_loader(self):
        ...         return pytorch.DataLoader(torch.rand(64, 1), batch_size=8)
        ...     def build_validation_data_loader(self):
        ...         return pytorch.DataLoader(torch.rand(16, 1), batch_size=8)
        ...     def train_batch(self, batch, epoch_idx, batch_idx):
        ...         loss = (self.model(batch) - 2 * batch).square().mean()
        ...         self.context.backward(loss)
        ...         self.context.step_optimizer(self.optimizer)
        ...         return {"loss": loss}
        ...     def evaluate_batch(self, batch):
        ...         return {"validation_loss": (self.model(batch) - 2 * batch).square().mean()}
    """

    @abc.abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Build and wrap models, optimizers and schedulers.

        Wrap models first (``context.wrap_model``), then optimizers over the models' parameters
        (``context.wrap_optimizer``), then the optimizers' schedulers (``context.wrap_lr_scheduler``). Checkpoints hold
        wrapped objects only.
        """

    @abc.abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """Train on one batch: forward, ``context.backward(loss)``, ``context.step_optimizer(optimizer)``.

        Args:
            batch: a batch of the training loader, on the device.
            epoch_idx: index of the epoch, from 0.
            batch_idx: index of the batch over the whole run, from 0.

        Returns:
            The metrics of the batch by name, or one tensor in place of ``{"loss": tensor}``.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader | torch.utils.data.DataLoader[Any]:
        """Return the loader of the training data.

        A ``torch.utils.data.DataLoader`` needs ``context.experimental.disable_dataset_reproducibility_checks()``, and
        must repeat the data and shard over the ranks.
        """

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader | torch.utils.data.DataLoader[Any]:
        """Return the loader of the validation data; see :meth:`build_training_data_loader`."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return callbacks by name; a checkpoint holds each callback's state under its name."""
        return {}

    # An override may have either signature, which type checkers allow for these.
    def evaluate_batch(self, batch: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the validation metrics of one batch, to be reduced over batches and ranks.

        An override is ``evaluate_batch(self, batch)`` or ``evaluate_batch(self, batch, batch_idx)``, with the index of
        the batch in this validation.
        """
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return how validation metrics are reduced: one reducer for all, or one for each metric by name."""
        return Reducer.AVG

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
        """Return the validation metrics over all of the data. Runs on the chief only, with unsharded data."""
        raise NotImplementedError

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of records in a batch. Override for batches of unusual types."""
        return data_length(batch)


class ExternalStateTrial(PyTorchTrial):
    """A trial that another library trains: it wraps nothing, and its weights are files of the checkpoints.

    Attributes:
        trial_type: the entry in ``load_data.json``.
        config_fields: the fields of an experiment configuration that the trial reads and PyTorch trials do not.
    """

    trial_type: ClassVar[str]
    config_fields: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def begin_run(self, files: pathlib.Path | None, batches_trained: int, exact: bool) -> None:
        """Prepare a run, on every rank, before the loaders are built.

        The run resumes from the checkpoint in the directory ``files``, if given. An ``exact`` checkpoint was written
        by det_lightning, and has the position in the data.
        """

    @abc.abstractmethod
    def collect_files(self) -> pathlib.Path | None:
        """Return a new directory on the chief, of files to move into a checkpoint; None on other ranks."""

    @abc.abstractmethod
    def describe_files(self) -> dict[str, str]:
        """Return ``framework`` and ``format`` for ``metadata.json``."""


def require_trial_class(call: str, trial_class: Any) -> None:
    """Raise a TypeError unless ``trial_class`` is a subclass of ``PyTorchTrial``, or a function that builds a trial."""
    is_trial = isinstance(trial_class, type) and issubclass(trial_class, PyTorchTrial)
    if not is_trial and (isinstance(trial_class, type | torch.nn.Module | PyTorchTrial) or not callable(trial_class)):
        raise TypeError(
            f"{call} takes the class of a trial, a subclass of det_lightning.pytorch.PyTorchTrial; got "
            f"{short_text(trial_class)}."
        )


def build_trial(
    trial_class: Callable[..., Any], context: PyTorchTrialContext, trial_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Build a trial; a TypeError names arguments that its class misses, or hyperparameters that are text."""
    arguments = {} if trial_kwargs is None else trial_kwargs
    require(isinstance(arguments, Mapping), "trial_kwargs=", "a dict of arguments after the context", arguments)
    try:
        return trial_class(context, **arguments)
    except TypeError as error:
        _require_arguments(trial_class, context, arguments)
        explain_texts(error, context.settings.hparams)
        raise


def _require_arguments(
    trial_class: Callable[..., Any], context: PyTorchTrialContext, arguments: Mapping[str, Any]
) -> None:
    signature = inspect.signature(trial_class)
    try:
        signature.bind(context, **arguments)
    except TypeError as error:
        name = getattr(trial_class, "__name__", repr(trial_class))
        given = f"trial_kwargs={short_text(dict(arguments))}" if arguments else "without trial_kwargs="
        raise TypeError(
            f"{name}{signature} was called with the context, {given}: {error}. A trial takes the context first; pass "
            "other arguments in trial_kwargs={...} of TrialModule or load_trial_from_checkpoint_path, or define "
            "defaults."
        ) from error


_BUILDERS = ("build_model", "optimizer")

# In a second run a context holds the parts wrapped by the first run, which must not count as wrapped by the trial.
_adapted: weakref.WeakKeyDictionary[PyTorchTrialContext, weakref.ref[PyTorchTrial]] = weakref.WeakKeyDictionary()


class LegacyTrialAdapter(PyTorchTrial):
    """Gives the legacy trial ``trial`` today's interface; ``context`` has wrapped the model and the optimizer."""

    def __init__(self, context: PyTorchTrialContext, trial: PyTorchTrial) -> None:
        self.trial: Any = trial
        self._context = context
        self._model = context.get_model()
        self._optimizer = context.get_optimizer()

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """Let the trial compute the loss, then do the backward pass and the optimizer step."""
        metrics = self.trial.train_batch(batch=batch, model=self._model, epoch_idx=epoch_idx, batch_idx=batch_idx)
        loss: Any = metrics.get("loss") if isinstance(metrics, dict) else metrics
        self._context.backward(loss)
        self._context.step_optimizer(self._optimizer)
        return metrics  # type: ignore[no-any-return]

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> Any:
        return self.trial.evaluate_batch(batch=batch, model=self._model)

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader[Any]) -> Any:
        return self.trial.evaluate_full_dataset(data_loader=data_loader, model=self._model)

    def build_training_data_loader(self) -> Any:
        return self.trial.build_training_data_loader()

    def build_validation_data_loader(self) -> Any:
        return self.trial.build_validation_data_loader()

    def build_callbacks(self) -> Any:
        return self.trial.build_callbacks()

    def evaluation_reducer(self) -> Any:
        return self.trial.evaluation_reducer()

    def get_batch_length(self, batch: Any) -> Any:
        return self.trial.get_batch_length(batch)


def is_legacy_trial(trial: type[PyTorchTrial] | PyTorchTrial) -> bool:
    """Return whether a trial, or a class of trials, has the interface before Determined 0.12.13.

    A legacy trial has ``build_model`` and ``optimizer``, as any trial may, and a ``train_batch`` with a ``model``.
    """
    trial_class = trial if isinstance(trial, type) else type(trial)
    if _find_missing_builders(trial_class):
        return False
    parameters = _get_parameters(trial_class)
    return "model" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def adapt_legacy_trial(trial: PyTorchTrial, context: PyTorchTrialContext) -> PyTorchTrial:
    """Return an adapter for a legacy trial, with its model and optimizer wrapped; return any other trial unchanged.

    A trial that wraps something is no legacy trial. A second run uses the model and optimizer of the first run.
    """
    if not is_legacy_trial(trial):
        return trial
    adapted = _adapted.get(context)
    if adapted is None or adapted() is not trial:
        if context.models or context.optimizers:
            return trial
        logger.info("%s has the interface before Determined 0.12.13; it runs adapted.", type(trial).__name__)
        _wrap_parts(trial, context)
        _adapted[context] = weakref.ref(trial)
    return LegacyTrialAdapter(context, trial)


def original_trial(trial: PyTorchTrial) -> PyTorchTrial:
    """Return the user's trial: the trial inside an adapter, or ``trial``."""
    return trial.trial if isinstance(trial, LegacyTrialAdapter) else trial


def interface_mistakes(trial: PyTorchTrial) -> list[str]:
    """Return the mistakes of a trial that takes a ``model`` but fits neither interface."""
    if isinstance(trial, LegacyTrialAdapter):
        return []
    parameter = _get_parameters(type(trial)).get("model")
    if parameter is None or parameter.default is not parameter.empty:
        return []
    name = type(trial).__name__
    missing = [f"{builder}()" for builder in _find_missing_builders(type(trial))]
    found = f"{name} does not define {' and '.join(missing)}" if missing else "something is wrapped already"
    return [
        f"{name}.train_batch() takes a model, as before Determined 0.12.13; such a trial defines build_model() and "
        f"optimizer(model) and wraps nothing, but {found}. Either define both methods, or wrap in __init__ and remove "
        "the parameter"
    ]


def _find_missing_builders(trial_class: type[PyTorchTrial]) -> list[str]:
    return [name for name in _BUILDERS if not callable(getattr(trial_class, name, None))]


def _get_parameters(trial_class: type[PyTorchTrial]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(trial_class.train_batch).parameters
    except ValueError:  # compiled code may have no signature
        return {}


def _wrap_parts(trial: Any, context: PyTorchTrialContext) -> None:
    model = context.wrap_model(trial.build_model())
    optimizer = context.wrap_optimizer(trial.optimizer(model))
    create_lr_scheduler = getattr(trial, "create_lr_scheduler", None)
    scheduler = None if create_lr_scheduler is None else create_lr_scheduler(optimizer)
    if scheduler is not None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"{type(trial).__name__}.create_lr_scheduler() must return None or a pytorch.LRScheduler, "
                "such as LRScheduler(scheduler, step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH); got a "
                f"{type(scheduler).__name__}."
            )
        context.wrap_lr_scheduler(scheduler.scheduler, scheduler.step_mode, scheduler.frequency)
    level = context.settings.section("optimizations").get("mixed_precision") or "O0"
    if level != "O0":
        context.configure_apex_amp(model, optimizer, opt_level=level)
