"""``PyTorchTrial``, the interface of a trial, and building an object of a trial's class."""

from __future__ import annotations

import abc
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.utils.data

from det_lightning.arguments import require
from det_lightning.hyperparameters import explain_texts
from det_lightning.masking import short_text
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._data import DataLoader, TorchData, data_length
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._reducer import Reducer


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

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        """Return the validation metrics of one batch, to be reduced over batches and ranks.

        An override may omit the parameter ``batch_idx``, the index of the batch in this validation.
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


class SelfSavingTrial(PyTorchTrial):
    """A trial that trains with another library, wraps nothing, and keeps the weights as files in checkpoints.

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
    """Return a trial; a TypeError names the missing arguments of the class, or the hyperparameters that are texts."""
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
