"""``EstimatorTrial``, the interface of a trial. Does not need TensorFlow."""

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
        context: hyperparameters, rank and size, and the methods that wrap optimizers and datasets.

    Attributes:
        trial_context_class: the class of the context.
    """

    trial_context_class = EstimatorTrialContext

    def __init__(self, context: EstimatorTrialContext) -> None:
        self.context = context

    @abc.abstractmethod
    def build_estimator(self) -> Any:
        """Return a ``tf.estimator.Estimator``, premade or custom.

        Pass the optimizer through ``context.wrap_optimizer``. The model directory, seed and save settings of a
        ``RunConfig`` are replaced; ``train_distribute`` and ``eval_distribute`` must not be set.
        """

    @abc.abstractmethod
    def build_train_spec(self) -> Any:
        """Return a ``tf.estimator.TrainSpec`` with an ``input_fn`` that returns a ``tf.data.Dataset``.

        Pass the dataset through ``context.wrap_dataset``; training repeats the dataset. ``max_steps`` is not used.
        """

    @abc.abstractmethod
    def build_validation_spec(self) -> Any:
        """Return a ``tf.estimator.EvalSpec``; validations evaluate ``steps`` batches, or all batches for None."""

    def build_serving_input_receiver_fns(self) -> dict[str, ServingInputReceiverFn]:
        """Return functions by name; each function adds a SavedModel to checkpoints, in a subdirectory of the name."""
        return {}
