"""Building a trial on the device that Lightning chose."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import Strategy

from det_lightning.adapters.strategies.processes import TrainingProcesses
from det_lightning.precision import WholeModelPrecision
from det_lightning.pytorch._legacy_trial import adapt_legacy_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial


class TrialBuilder:
    """Builds a trial once its device is known, or takes one that is built; see :class:`TrialModule`.

    Raises:
        TypeError: ``trial`` is not a trial, or was built and has no ``context``.
    """

    def __init__(
        self,
        trial: type[PyTorchTrial] | PyTorchTrial,
        context: PyTorchTrialContext | None,
        trial_kwargs: dict[str, Any],
        context_kwargs: dict[str, Any],
    ) -> None:
        built = isinstance(trial, PyTorchTrial)
        if not built and not (isinstance(trial, type) and issubclass(trial, PyTorchTrial)):
            raise TypeError(f"TrialModule takes a subclass of det_lightning.pytorch.PyTorchTrial; got {trial!r}.")
        if built and context is None:
            raise TypeError(f"TrialModule got a {type(trial).__name__} that was built already; give its context= too.")
        self._owns_context = context is None
        self._trial = trial
        self._context = context
        self._trial_kwargs = trial_kwargs
        self._context_kwargs = context_kwargs

    def build(
        self, strategy: Strategy, precision: WholeModelPrecision | None = None
    ) -> tuple[PyTorchTrial, PyTorchTrialContext]:
        """Return the trial, adapted if it is an old one, and its context; they are built on the first call.

        Raises:
            InvalidExperimentException: there is a ``precision`` for all models, and the trial chooses one too.
        """
        if self._context is None:
            processes = TrainingProcesses.of_trainer(strategy)
            self._context = PyTorchTrialContext(
                **self._context_kwargs,
                backend=processes.backend,
                distributed=processes.distributed,
                enable_tensorboard_logging=False,
            )
        is_new = isinstance(self._trial, type)
        if precision is not None:
            self._context.use_whole_model_precision(precision)
        if isinstance(self._trial, type):
            self._trial = self._trial(self._context, **self._trial_kwargs)
        self._trial = adapt_legacy_trial(self._trial, self._context)
        if is_new:
            self._context.wrapped.require_same_on_all_ranks()
        return self._trial, self._context

    def abandon(self, error: BaseException) -> None:
        """Notify the other ranks of an error, if the context was made here."""
        if self._owns_context and self._context is not None:
            self._context.distributed.abandon(error)
