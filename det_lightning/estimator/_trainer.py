"""``init`` and ``Trainer`` for Estimator trials."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from det_lightning.arguments import require
from det_lightning.core._with_statement import for_with_statement
from det_lightning.estimator._adapter import adapt_class
from det_lightning.estimator._context import EstimatorTrialContext
from det_lightning.estimator._trial import EstimatorTrial
from det_lightning.pytorch import _trainer


@for_with_statement("with estimator.init(...) as context")
def init(**options: Any) -> Iterator[EstimatorTrialContext]:
    """Create the context for a trial; use it in a ``with`` statement.

    Args:
        **options: the arguments of ``det_lightning.pytorch.init``, with the same errors. ``trial_seed`` also seeds the
            graphs, in place of the seed of the trial's ``RunConfig``.
    """
    with _trainer.init(**options) as run:
        yield EstimatorTrialContext(run)


class Trainer(_trainer.Trainer):
    """Trains an Estimator trial on PyTorch Lightning.

    Args:
        trial: the trial, built with ``context``.
        context: from :func:`init`.
        **lightning: arguments of ``pl.Trainer``; see ``det_lightning.pytorch.Trainer``.
    """

    def __init__(self, trial: EstimatorTrial, context: EstimatorTrialContext, **lightning: Any) -> None:
        call = "Trainer(trial, context)"
        require(isinstance(trial, EstimatorTrial), call, "an EstimatorTrial", trial)
        require(isinstance(context, EstimatorTrialContext), call, "an EstimatorTrialContext", context)
        self.adapter = adapt_class(type(trial))(context.run, trial, context)
        super().__init__(self.adapter, context.run, **lightning)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, validate and checkpoint, with the arguments of ``det_lightning.pytorch.Trainer.fit``."""
        given = inspect.signature(_trainer.Trainer.fit).bind(self, *args, **kwargs).arguments
        self.adapter.single_batch = given.get("test_mode") == 1
        super().fit(*args, **kwargs)
