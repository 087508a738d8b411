"""Evaluation of a trial on the data of ``trainer.test``, and wrappers for optimizers that Lightning saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.adapters.given_data import take_only_loader
from det_lightning.core._metrics import select_scalars
from det_lightning.distributed.rank_exchange import RankExchange
from det_lightning.engine.metrics import reduce_validation_metrics, to_numpy
from det_lightning.engine.train_and_evaluate import Evaluation
from det_lightning.pytorch._legacy_trial import original_trial
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial


class GivenEvaluation:
    """Evaluates a trial on data of a call, without the trial's callbacks."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, loaders: Any) -> None:
        self._trial = trial
        self._context = context
        self._evaluation = Evaluation(trial, context, single_batch=False)
        if not self._evaluation.by_batch and context.distributed.size > 1:
            raise errors.UnsupportedTrainerFlags(
                f"test() of {type(original_trial(trial)).__name__}, which has evaluate_full_dataset(), works in one "
                f"process; this run has {context.distributed.size}."
            )
        self._loader = take_only_loader(loaders, "test_dataloader")
        self._has_begun = False
        context.reducers.reset_reducers()

    def has_begun(self) -> bool:
        """Return whether any rank has got a batch; all ranks must call this."""
        return any(self._context.distributed.allgather(self._has_begun))

    def evaluate(self, batch: Any) -> None:
        """Evaluate a batch on the device, unless the trial evaluates the full dataset."""
        self._has_begun = True
        if self._evaluation.by_batch:
            self._evaluation.evaluate(iter([batch]), lambda: True)

    def close(self) -> dict[str, float]:
        """Return the metrics over all batches and ranks; all ranks must call this."""
        exchange = RankExchange(self._context.distributed)
        if self._evaluation.by_batch:
            reducer = self._trial.evaluation_reducer()
            metrics, _ = reduce_validation_metrics(self._evaluation.close(), reducer, exchange)
        else:
            self._evaluation.evaluate_full_dataset(self._loader)
            metrics = self._evaluation.full_metrics
        metrics.update(
            to_numpy(self._context.reducers.reduce_metrics(for_training=False, allgather_fn=exchange.allgather))
        )
        return select_scalars(metrics)


class PlainOptimizer:
    """An optimizer of another library, with the attributes and methods of torch's optimizers that Lightning looks for.

    The trial steps the optimizer itself; Lightning only saves and loads the state. The methods stand here because
    Lightning's check of its protocol ``Optimizable`` ignores ``__getattr__`` since Python 3.12.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.param_groups: list[dict[Any, Any]] = getattr(optimizer, "param_groups", [])
        self.defaults: dict[Any, Any] = getattr(optimizer, "defaults", {})
        self.state: Any = getattr(optimizer, "state", {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, with the closure if there is a closure."""
        return self._optimizer.step(*([] if closure is None else [closure]))

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad(*arguments, **keywords)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from a checkpoint."""
        self._optimizer.load_state_dict(state_dict)
