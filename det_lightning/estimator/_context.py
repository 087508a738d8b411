"""The context of an Estimator trial: wraps optimizers and datasets, makes metrics, looks up settings."""

from __future__ import annotations

from typing import Any

from det_lightning.estimator._cache import DatasetCache
from det_lightning.estimator._reducer import ReducedMetrics
from det_lightning.pytorch._forwarding import forward
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._settings import TrialSettings


class EstimatorContext:
    """Wraps optimizers and datasets.

    Args:
        run: the context of the run, for the methods that forward.

    Attributes:
        distributed: rank and size.
        experimental: dataset caches, and :meth:`make_metric` at an older path.
        reduced: the metrics of the current evaluation.
        wrapped_optimizer, wrapped_dataset: whether the trial has wrapped an optimizer, and a dataset.
    """

    def __init__(self, run: PyTorchTrialContext) -> None:
        self.run = run
        self.distributed = run.distributed
        self.reduced = ReducedMetrics(run.distributed.allgather)
        self.experimental = EstimatorExperimentalContext(self)
        self.wrapped_optimizer = False
        self.wrapped_dataset = False

    make_metric = forward("reduced", ReducedMetrics.make_metric)

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Wrap a newly created optimizer; use the returned optimizer from then on.

        The returned optimizer exchanges gradients between the ranks and aggregates over ``aggregation_frequency``
        batches; ``global_step`` still counts batches. For one rank and no aggregation, the same optimizer is returned.

        Args:
            optimizer: a ``tf.compat.v1.train.Optimizer`` or a ``tf.keras.optimizers.legacy.Optimizer``.

        Raises:
            TypeError: wrapping is needed, but ``optimizer`` is a name or an unsupported object.
        """
        from det_lightning.estimator._optimizer import wrap_optimizer

        self.wrapped_optimizer = True
        settings = self.run.settings
        return wrap_optimizer(
            optimizer, self.distributed.size, settings.aggregation_frequency, settings.average_aggregated_gradients
        )

    def wrap_dataset(self, dataset: Any, shard_dataset: bool = True) -> Any:
        """Wrap a newly created dataset; use the returned dataset from then on.

        Args:
            dataset: a ``tf.data.Dataset``.
            shard_dataset: give each rank a share of the elements; if False, the trial shards.
        """
        self.wrapped_dataset = True
        if self.distributed.size == 1 or not shard_dataset:
            return dataset
        return dataset.shard(self.distributed.size, self.distributed.rank)


class EstimatorTrialContext(EstimatorContext):
    """Passed to a trial's ``__init__``: looks up hyperparameters and configuration, wraps optimizers and datasets."""

    get_hparams = forward("run.settings", TrialSettings.get_hparams)
    get_hparam = forward("run.settings", TrialSettings.get_hparam)
    get_experiment_config = forward("run.settings", TrialSettings.get_experiment_config)
    get_data_config = forward("run.settings", TrialSettings.get_data_config)
    get_global_batch_size = forward("run.settings", TrialSettings.get_global_batch_size)
    get_per_slot_batch_size = forward("run.settings", TrialSettings.get_per_slot_batch_size)
    get_trial_seed = forward("run.settings", TrialSettings.get_trial_seed)
    get_experiment_id = forward("run", PyTorchTrialContext.get_experiment_id)
    get_trial_id = forward("run", PyTorchTrialContext.get_trial_id)
    get_tensorboard_path = forward("run", PyTorchTrialContext.get_tensorboard_path)
    get_initial_batch = forward("run", PyTorchTrialContext.get_initial_batch)
    set_stop_requested = forward("run", PyTorchTrialContext.set_stop_requested)
    get_stop_requested = forward("run", PyTorchTrialContext.get_stop_requested)


class EstimatorExperimentalContext:
    """The object ``context.experimental``."""

    def __init__(self, context: EstimatorContext) -> None:
        self._context = context
        self.cache = DatasetCache(context.run)

    make_metric = forward("_context.reduced", ReducedMetrics.make_metric)
    cache_train_dataset = forward("cache", DatasetCache.cache_train_dataset)
    cache_validation_dataset = forward("cache", DatasetCache.cache_validation_dataset)
