"""``DatasetCache``: caches datasets on disk, so that later runs read the elements instead of creating new ones."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
import pickle
import shutil
import sys
import uuid
from collections.abc import Callable
from typing import Any

import platformdirs

from det_lightning import errors
from det_lightning.escaping import escape, get_logger
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

logger = get_logger(__name__)

_SPEC = "element_spec.pkl"
_COUNT = "elements.txt"
_SPEC_NAMES = {"TensorSpec", "TensorShape", "Dimension", "as_dtype"}

MakeDataset = Callable[..., Any]


class DatasetCache:
    """Caches a trial's datasets in the directory ``data_layer.container_storage_path`` of the configuration.

    The default is a subdirectory of the user's cache directory.
    """

    def __init__(self, run: PyTorchTrialContext) -> None:
        self._run = run
        self.caches_training = False

    def cache_train_dataset(
        self, dataset_id: str, dataset_version: str, shuffle: bool = False, skip_shuffle_at_epoch_end: bool = False
    ) -> Callable[[MakeDataset], MakeDataset]:
        self.caches_training = True
        reshuffles = not skip_shuffle_at_epoch_end
        return self._decorator(dataset_id, f"{dataset_version}_train", shuffle, reshuffles, is_training=True)

    def cache_validation_dataset(
        self, dataset_id: str, dataset_version: str, shuffle: bool = False
    ) -> Callable[[MakeDataset], MakeDataset]:
        return self._decorator(dataset_id, f"{dataset_version}_val", shuffle, reshuffles=False, is_training=False)

    def _decorator(
        self, dataset_id: str, version: str, shuffle: bool, reshuffles: bool, is_training: bool
    ) -> Callable[[MakeDataset], MakeDataset]:
        seed = self._run.get_trial_seed() if shuffle else None

        def decorate(make: MakeDataset) -> MakeDataset:
            @functools.wraps(make)
            def make_cached(*args: Any, **kwargs: Any) -> Any:
                directory = self._directory(dataset_id, version)
                self._fill(directory, lambda: make(*args, **kwargs))
                dataset, count = _read_dataset(directory)
                if shuffle:
                    dataset = dataset.shuffle(max(count, 1), seed=seed, reshuffle_each_iteration=reshuffles)
                distributed = self._run.distributed
                if distributed.size == 1:
                    return dataset
                if is_training:  # all ranks get the same number
                    dataset = dataset.take(count - count % distributed.size)
                return dataset.shard(distributed.size, distributed.rank)

            return make_cached

        return decorate

    def _directory(self, dataset_id: str, version: str) -> pathlib.Path:
        layer = self._run.settings.section("data_layer")
        if layer.get("type", "shared_fs") != "shared_fs":
            raise errors.InvalidExperimentException(
                f"Datasets are cached on disk; the experiment configuration has data_layer.type={layer['type']!r}. Use "
                "shared_fs, with container_storage_path."
            )
        given = layer.get("container_storage_path")
        root = pathlib.Path(given) if given else pathlib.Path(platformdirs.user_cache_dir("det_lightning")) / "datasets"
        # Names may contain slashes, and no two names may share a directory.
        name = f"{dataset_id}-{version}"
        readable = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        return root / f"{readable[:80]}-{hashlib.sha256(repr((dataset_id, version)).encode()).hexdigest()[:8]}"

    def _fill(self, directory: pathlib.Path, make: Callable[[], Any]) -> None:
        """Have one rank per node write the dataset, unless it already exists."""
        distributed = self._run.distributed
        if distributed.local_rank == 0 and not (directory / _COUNT).is_file():
            logger.info("The dataset is written to %s.", directory)
            temporary = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}")
            temporary.mkdir(parents=True)
            try:
                _write_dataset(temporary, make)
                temporary.rename(directory)
            except OSError:
                if not (directory / _COUNT).is_file():  # otherwise another process was faster
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        if distributed.size > 1:
            distributed.allgather(None)


def _write_dataset(directory: pathlib.Path, make: Callable[[], Any]) -> None:
    """Write the elements of the dataset that ``make`` returns, in order."""
    from det_lightning.estimator._tensorflow import tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dataset = make()
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(f"A cached function must return a tf.data.Dataset; got a {type(dataset).__name__}.")
        (directory / _SPEC).write_bytes(pickle.dumps(dataset.element_spec))
        element = tf.compat.v1.data.make_one_shot_iterator(dataset.map(_serialize)).get_next()
        count = 0
        writer = tf.io.TFRecordWriter(str(directory / "elements.tfrecord"))
        with writer, contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                writer.write(session.run(element))
                count += 1
        (directory / _COUNT).write_text(str(count))


def _serialize(*parts: Any) -> Any:
    """Serialize the tensors of an element into one string."""
    from det_lightning.estimator._tensorflow import tf

    return tf.io.serialize_tensor(tf.stack([tf.io.serialize_tensor(part) for part in tf.nest.flatten(parts)]))


def _read_dataset(directory: pathlib.Path) -> tuple[Any, int]:
    """Return the cached dataset and the number of elements."""
    from det_lightning.estimator._tensorflow import tf

    with (directory / _SPEC).open("rb") as file:
        spec = _SpecUnpickler(file).load()
    specs = tf.nest.flatten(spec)

    def parse(record: Any) -> Any:
        parts = tf.io.parse_tensor(record, tf.string)
        values = [tf.io.parse_tensor(parts[index], one.dtype) for index, one in enumerate(specs)]
        for value, one in zip(values, specs, strict=True):
            value.set_shape(one.shape)
        return tf.nest.pack_sequence_as(spec, values)

    dataset = tf.data.TFRecordDataset([str(directory / "elements.tfrecord")]).map(parse)
    return dataset, int((directory / _COUNT).read_text())


class _SpecUnpickler(pickle.Unpickler):
    """Unpickles only containers, named tuples and tensor specs, because the file may come from an untrusted source."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("collections", "OrderedDict") or (
            module_name.startswith("tensorflow.python.framework.") and global_name in _SPEC_NAMES
        ):
            return super().find_class(module_name, global_name)
        found = getattr(sys.modules.get(module_name), global_name, None)
        if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
            return found
        raise pickle.UnpicklingError(
            f"The file {_SPEC} of a cached dataset refers to {escape(f'{module_name}.{global_name}'):.200}, so reading "
            "the file could run code. Remove the cache; the next run writes the cache again."
        )
