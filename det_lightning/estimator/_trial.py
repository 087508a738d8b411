"""The interface that a trial implements. Does not need TensorFlow."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from det_lightning.estimator._context import EstimatorTrialContext

#: A function without arguments that returns a ``ServingInputReceiver`` or ``TensorServingInputReceiver``.
ServingInputReceiverFn = Callable[..., Any]


class EstimatorTrial(abc.ABC):
    """A trial that trains a TensorFlow Estimator, with TensorFlow's version 1 behaviour.

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

        Its optimizer must come from ``context.wrap_optimizer``. The model directory, seed and save settings of the
        configuration are replaced; ``train_distribute`` and ``eval_distribute`` must not be set.
        """

    @abc.abstractmethod
    def build_train_spec(self) -> Any:
        """Return a ``tf.estimator.TrainSpec``, whose ``input_fn`` returns a ``tf.data.Dataset``.

        The dataset must come from ``context.wrap_dataset``, and is repeated endlessly. ``max_steps`` is not used.
        """

    @abc.abstractmethod
    def build_validation_spec(self) -> Any:
        """Return a ``tf.estimator.EvalSpec``; validations evaluate ``steps`` batches, or all if it is None."""

    def build_serving_input_receiver_fns(self) -> dict[str, ServingInputReceiverFn]:
        """Return functions by name; each adds a SavedModel to checkpoints, in a subdirectory of that name."""
        return {}
