"""The context of an Estimator trial: wraps optimizers and datasets, makes metrics, looks up settings."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from det_lightning.estimator._cache import DatasetCache, MakeDataset
from det_lightning.estimator._reducer import ReducedMetrics
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._settings import SettingsLookups, TrialSettings


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

    def make_metric(self, metric: Any, reducer: Any, numpy_dtype: Any) -> Any:
        """Return a metric for ``eval_metric_ops``: the pair of value and update operation.

        Args:
            metric: a tensor, or a flat list or dict of tensors.
            reducer: a ``MetricReducer``, or a function of the list of values of all batches and ranks.
            numpy_dtype: the type of the metric, as accepted by ``numpy.dtype``.

        Raises:
            TypeError: ``metric`` is nested, or has another type.
        """
        return self.reduced.make_metric(metric, reducer, numpy_dtype)

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Wrap a newly created optimizer; use the returned optimizer from then on.

        The returned optimizer all-reduces gradients and aggregates over ``aggregation_frequency`` batches;
        ``global_step`` still counts batches. For one rank and no aggregation, the same optimizer is returned.

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


class EstimatorTrialContext(EstimatorContext, SettingsLookups):
    """Passed to a trial's ``__init__``: looks up hyperparameters and configuration, wraps optimizers and datasets."""

    @property
    def settings(self) -> TrialSettings:  # type: ignore[override]
        return self.run.settings

    def get_tensorboard_path(self) -> pathlib.Path:
        """Return the directory of this run's TensorBoard files."""
        return self.run.get_tensorboard_path()

    def get_initial_batch(self) -> int:
        """Return the index of the first batch of this run: 0, or the position of the checkpoint resumed from."""
        return self.run.get_initial_batch()

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask the run to end with a checkpoint at the next boundary; raise an AssertionError unless given a bool."""
        self.run.set_stop_requested(stop_requested)

    def get_stop_requested(self) -> bool:
        """Return whether the trial asked for the run to end."""
        return self.run.get_stop_requested()


class EstimatorExperimentalContext:
    """The object ``context.experimental``."""

    def __init__(self, context: EstimatorContext) -> None:
        self._context = context
        self.cache = DatasetCache(context.run)

    def make_metric(self, metric: Any, reducer: Any, numpy_dtype: Any) -> Any:
        """Do the same as :meth:`EstimatorContext.make_metric`."""
        return self._context.reduced.make_metric(metric, reducer, numpy_dtype)

    def cache_train_dataset(
        self, dataset_id: str, dataset_version: str, shuffle: bool = False, skip_shuffle_at_epoch_end: bool = False
    ) -> Callable[[MakeDataset], MakeDataset]:
        """Return a decorator for a function that makes the training dataset, without batching.

        The first call writes the elements to disk; later calls, in any run, read from disk. Each rank gets a share of
        the elements, so do not wrap the dataset.

        Args:
            dataset_id: name of the dataset.
            dataset_version: version of the dataset; each version has a separate cache.
            shuffle: shuffle the samples with the trial's seed.
            skip_shuffle_at_epoch_end: keep the same order in every epoch.

        Raises:
            InternalException: ``shuffle`` is set, but the trial has no seed.
        """
        return self.cache.cache_train_dataset(dataset_id, dataset_version, shuffle, skip_shuffle_at_epoch_end)

    def cache_validation_dataset(
        self, dataset_id: str, dataset_version: str, shuffle: bool = False
    ) -> Callable[[MakeDataset], MakeDataset]:
        """Return a decorator for a function that makes the validation dataset; see :meth:`cache_train_dataset`."""
        return self.cache.cache_validation_dataset(dataset_id, dataset_version, shuffle)
