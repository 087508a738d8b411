"""The interface that a trial implements. Needs no TensorFlow."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from det_lightning.estimator._context import EstimatorTrialContext


class EstimatorTrial(abc.ABC):
    """A trial of TensorFlow Estimators; TensorFlow has the behaviour of version 1 in it.

    Args:
        context: hyperparameters, rank and size; its methods wrap optimizers and datasets.

    Attributes:
        trial_context_class: the class of the context.
    """

    trial_context_class = EstimatorTrialContext

    def __init__(self, context: EstimatorTrialContext) -> None:
        self.context = context

    @abc.abstractmethod
    def build_estimator(self) -> Any:
        """Return a ``tf.estimator.Estimator``, premade or custom, with ``config=tf.estimator.RunConfig(...)``.

        Its optimizer went through ``context.wrap_optimizer``. Directory, seed and saving of the configuration are
        replaced; ``train_distribute`` and ``eval_distribute`` must not be set.
        """

    @abc.abstractmethod
    def build_train_spec(self) -> Any:
        """Return a ``tf.estimator.TrainSpec``, whose ``input_fn`` returns a ``tf.data.Dataset``.

        The dataset went through ``context.wrap_dataset``, and is repeated without end. ``max_steps`` is not used.
        """

    @abc.abstractmethod
    def build_validation_spec(self) -> Any:
        """Return a ``tf.estimator.EvalSpec``; validations evaluate its ``steps`` batches, or all if that is None."""

    def build_serving_input_receiver_fns(self) -> dict[str, Callable[..., Any]]:
        """Return functions by name; for each, checkpoints get a SavedModel in a subdirectory of that name."""
        return {}
