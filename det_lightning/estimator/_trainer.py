"""``init`` and ``Trainer`` for Estimator trials, and the Native API of older releases, without a trial class."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from det_lightning.arguments import require
from det_lightning.core._task import current_task
from det_lightning.core._with_statement import for_with_statement
from det_lightning.estimator._adapter import adapt_class
from det_lightning.estimator._context import EstimatorTrialContext
from det_lightning.estimator._trial import EstimatorTrial
from det_lightning.pytorch import _trainer
from det_lightning.units import Batch


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


class EstimatorNativeContext(EstimatorTrialContext):
    """The context of a script without a trial class; created by ``det_lightning.experimental.estimator.init``.

    Attributes:
        serving_input_receiver_fns: functions by name; each checkpoint gets a SavedModel for each function.
    """

    def __init__(self, run: Any, run_options: dict[str, Any], closing: contextlib.ExitStack) -> None:
        super().__init__(run)
        self.serving_input_receiver_fns: dict[str, Callable[..., Any]] = {}
        self._run_options = run_options
        self._closing = closing

    @classmethod
    def of_call(cls, config: Mapping[str, Any] | None, test: bool, directory: str) -> EstimatorNativeContext:
        """Return the context for the arguments of ``det_lightning.experimental.estimator.init``."""
        closing = contextlib.ExitStack()
        if directory:
            os.chdir(directory)
        run = closing.enter_context(_trainer.init(exp_conf=config))
        task = current_task()
        options: dict[str, Any] = {"latest_checkpoint": task.latest_checkpoint} if task is not None else {}
        if test:
            options.update(test_mode=True, max_length=Batch(1))
        return cls(run, options, closing)

    def train_and_evaluate(self, estimator: Any, train_spec: Any, eval_spec: Any) -> None:
        """Train on Lightning, for the length in the configuration; call once.

        Args:
            estimator: a ``tf.estimator.Estimator``.
            train_spec: a ``tf.estimator.TrainSpec``; ``max_steps`` is not used.
            eval_spec: a ``tf.estimator.EvalSpec``.

        Raises:
            ValueError: the configuration has no length.
            InvalidExperimentException: an argument has the wrong type, or the optimizer or dataset was not wrapped.
        """
        trial = _NativeTrial(self, estimator, train_spec, eval_spec)
        with self._closing:
            Trainer(trial, self).fit(**self._run_options)


class _NativeTrial(EstimatorTrial):
    """Holds the parts built by a script."""

    def __init__(self, context: EstimatorNativeContext, estimator: Any, train_spec: Any, eval_spec: Any) -> None:
        super().__init__(context)
        self._estimator = estimator
        self._train_spec = train_spec
        self._eval_spec = eval_spec
        self._serving = context.serving_input_receiver_fns

    def build_estimator(self) -> Any:
        return self._estimator

    def build_train_spec(self) -> Any:
        return self._train_spec

    def build_validation_spec(self) -> Any:
        return self._eval_spec

    def build_serving_input_receiver_fns(self) -> dict[str, Callable[..., Any]]:
        return self._serving
