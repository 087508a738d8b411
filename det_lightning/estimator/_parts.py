"""``EstimatorParts``: the estimator, specs, hooks and serving functions of a trial, and checks of the parts."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.estimator._context import EstimatorContext
from det_lightning.estimator._session import RunHook, StopForwarder
from det_lightning.estimator._tensorflow import tf


class InvalidEstimatorTrial(errors.InvalidExperimentException, RuntimeError):
    """The trial misuses the API for Estimators. A ``RuntimeError`` too, as in Determined."""


@dataclasses.dataclass(frozen=True)
class EstimatorParts:
    """The parts of a trial; see :class:`EstimatorTrial`."""

    estimator: Any
    train_spec: Any
    eval_spec: Any
    serving_input_receiver_fns: dict[str, Callable[..., Any]]

    @classmethod
    def of_trial(cls, trial: Any) -> EstimatorParts:
        """Build the parts of a trial."""
        return cls(
            trial.build_estimator(),
            trial.build_train_spec(),
            trial.build_validation_spec(),
            trial.build_serving_input_receiver_fns(),
        )

    def __post_init__(self) -> None:
        """Raise an InvalidEstimatorTrial with a list of all mistakes, if any."""
        mistakes = [
            f"{method}() must return a tf.estimator.{kind.__name__}; got a {type(value).__name__}"
            for method, kind, value in (
                ("build_estimator", tf.compat.v1.estimator.Estimator, self.estimator),
                ("build_train_spec", tf.estimator.TrainSpec, self.train_spec),
                ("build_validation_spec", tf.estimator.EvalSpec, self.eval_spec),
            )
            if not isinstance(value, kind)
        ]
        fns = self.serving_input_receiver_fns
        if not isinstance(fns, dict) or not all(isinstance(name, str) and callable(fn) for name, fn in fns.items()):
            mistakes.append(f"build_serving_input_receiver_fns() must return a dict of functions by name; got {fns!r}")
        if isinstance(self.estimator, tf.compat.v1.estimator.Estimator):
            mistakes += [
                f"the RunConfig of the estimator has {name}={value!r}; leave it out, because wrap_optimizer() and "
                "wrap_dataset() distribute the training"
                for name in ("train_distribute", "eval_distribute")
                if (value := getattr(self.estimator.config, name)) is not None
            ]
        if mistakes:
            raise InvalidEstimatorTrial("; ".join(mistakes) + ".")

    @property
    def warm_start(self) -> Any:
        """The ``tf.estimator.WarmStartSettings`` that initialize the weights, as for a Keras model, or None."""
        # Estimators have no public attribute.
        return getattr(self.estimator, "_warm_start_settings", None)

    def replace_estimator(self, model_dir: pathlib.Path, seed: int | None) -> Any:
        """Return an estimator for the same model that writes below ``model_dir``, with ``seed`` if not None."""
        estimator = self.estimator
        changes: dict[str, Any] = {
            "model_dir": str(model_dir),
            "save_checkpoints_steps": None,
            "save_checkpoints_secs": None,
        }
        if seed is not None:
            changes["tf_random_seed"] = seed

        def model_fn(features: Any, labels: Any, mode: Any, params: Any, config: Any) -> Any:
            return estimator.model_fn(features, labels, mode, config)

        return tf.estimator.Estimator(
            model_fn,
            config=estimator.config.replace(**changes),
            params=estimator.params,
            warm_start_from=self.warm_start,
        )

    def training_hooks(self, context: EstimatorContext, spec: Any) -> list[Any]:
        """Return the training hooks of the trial and of the ``model_fn``."""
        own = [*self.train_spec.hooks, *spec.training_hooks]
        if context.distributed.rank == 0:
            own += spec.training_chief_hooks
        return [StopForwarder(hook, context.run) for hook in own]

    def run_hooks(self) -> list[RunHook]:
        """Return the trial's hooks with the events of :class:`RunHook`."""
        return [hook for hook in self.train_spec.hooks if isinstance(hook, RunHook)]


def require_wrapped(context: EstimatorContext) -> None:
    """Raise an InvalidEstimatorTrial unless the trial has wrapped optimizer and training data, or cached the data."""
    caches = context.experimental.cache.caches_training
    if caches and context.wrapped_dataset:
        raise InvalidEstimatorTrial(
            "The trial passes the training dataset to context.experimental.cache_train_dataset() and to "
            "context.wrap_dataset(), so that each rank would get a share of a share. Leave out one call."
        )
    if not caches and not context.wrapped_dataset:
        raise InvalidEstimatorTrial(
            "The dataset was not wrapped: pass each dataset, for training and for validation, through "
            "context.wrap_dataset(dataset) right after it is made."
        )
    if not context.wrapped_optimizer:
        raise InvalidEstimatorTrial(
            "The optimizer was not wrapped: pass it through context.wrap_optimizer(optimizer) right after it is made."
        )
