"""``EstimatorAdapter``: an Estimator trial with the interface of PyTorch trials, for the engine."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

from det_lightning.core._reports import is_numerical_scalar
from det_lightning.escaping import get_logger
from det_lightning.estimator import _files
from det_lightning.estimator._context import EstimatorTrialContext
from det_lightning.estimator._graph import TrainingGraph
from det_lightning.estimator._parts import EstimatorParts, require_wrapped
from det_lightning.estimator._session import RunCount, StopForwarder, TrainingSession
from det_lightning.estimator._tensorflow import tf
from det_lightning.estimator._trial import EstimatorTrial
from det_lightning.pytorch._callback import PyTorchCallback
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import ExternalStateTrial

logger = get_logger(__name__)


class EstimatorAdapter(ExternalStateTrial):
    """Trains the Estimator of a trial: each batch is one run of the session.

    A ``trial`` that is built already comes with its ``own_context``. With ``single_batch``, validations use one batch.
    """

    trial_type = "EstimatorTrial"
    config_fields = ("data_layer", "records_per_epoch")
    trial_class: ClassVar[type[EstimatorTrial]]

    def __init__(
        self,
        context: PyTorchTrialContext,
        trial: EstimatorTrial | None = None,
        own_context: EstimatorTrialContext | None = None,
    ) -> None:
        context.experimental.disable_dataset_reproducibility_checks()
        self._run = context
        self._context = own_context or EstimatorTrialContext(context)
        self._trial = self.trial_class(self._context) if trial is None else trial
        self.single_batch = False
        self._estimator: Any = None
        self._session: TrainingSession | None = None
        self._files: pathlib.Path | None = None
        self._batches_trained = 0
        self._exact = False
        self._directories = contextlib.ExitStack()

    # Runs

    def begin_run(self, files: pathlib.Path | None, batches_trained: int, exact: bool) -> None:
        """Build the parts of the trial, and let the hooks load the checkpoint in ``files``."""
        parts = self._parts
        directory = self._directories.enter_context(tempfile.TemporaryDirectory(prefix="det_lightning-estimator-"))
        self._root = pathlib.Path(directory)
        self._estimator = parts.replace_estimator(self._root / "model", self._run.settings.trial_seed)
        self._files = files
        self._batches_trained = batches_trained
        self._exact = exact
        if files is not None:
            _files.find_model(files)
            if not exact:
                _files.restore_rng(files)
            for hook in parts.run_hooks():
                hook.on_checkpoint_load(str(files))

    @functools.cached_property
    def _parts(self) -> EstimatorParts:
        return EstimatorParts.of_trial(self._trial)

    def begin_training(self) -> None:
        """Build the graph and start the session, from the checkpoint if any."""
        warm_start = self._parts.warm_start if self._files is None else None
        training = TrainingGraph(self._estimator, self._parts.train_spec.input_fn, warm_start)
        require_wrapped(self._context)
        restore_from = None if self._files is None else _files.find_model(self._files)
        hooks = self._parts.training_hooks(self._context, training.spec)
        self._session = TrainingSession(training, hooks, restore_from, self._run.distributed)
        if self._files is not None and self._exact:
            of_rank = self._files / _files.RANKS_DIR / str(self._run.distributed.rank)
            same_ranks = len([*of_rank.parent.glob("*")]) == self._run.distributed.size
            self._session.restore_rank(of_rank if same_ranks else None, self._batches_trained)

    @property
    def is_training(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    def end_run(self) -> None:
        """End the session, notify the hooks, and remove the files of the run."""
        session = self._session
        self._session = None
        try:
            if session is not None:
                session.close()
        finally:
            for hook in self._parts.run_hooks():
                hook.on_trial_close()
            self._directories.close()

    # Training

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train on the next batch of the dataset; ``batch`` is a placeholder.

        Return the loss and the scalar summaries by tag. Raise a RuntimeError if the dataset is empty.
        """
        assert self._session is not None
        try:
            metrics = self._session.train()
        except tf.errors.OutOfRangeError as e:
            raise RuntimeError("The training dataset is empty. See build_train_spec().") from e
        self._run.optimizer_steps = (batch_idx + 1) // self._run.aggregation_frequency
        return metrics

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the metrics of this rank's share of the validation data; ``batch`` is a placeholder.

        TensorFlow evaluates in a separate graph, with the weights of the session or of the checkpoint.
        """
        spec = self._parts.eval_spec
        self._context.reduced.begin_graph()
        evaluated = RunCount()
        with contextlib.ExitStack() as stack:
            path = None if self._files is None else _files.find_model(self._files)
            if self._session is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._root))
                path = self._session.save_model(pathlib.Path(folder), with_graph=False)
            metrics = self._estimator.evaluate(
                spec.input_fn,
                steps=1 if self.single_batch else spec.steps,
                hooks=[*(StopForwarder(hook, self._run) for hook in spec.hooks), evaluated],
                checkpoint_path=path,
                name=spec.name,
            )
        if evaluated.count == 0:
            logger.warning(
                "Rank %d validated no batch, so its metrics, such as 0, describe no data: the dataset of "
                "build_validation_spec() is empty, or has fewer batches than there are ranks.",
                self._run.distributed.rank,
            )
        unused = sorted(name for name, value in metrics.items() if not is_numerical_scalar(value))
        if unused:
            logger.warning("Validation metrics that are not numbers are left out: %s.", ", ".join(unused))
        return {name: value for name, value in metrics.items() if name not in unused}

    def build_training_data_loader(self) -> Any:
        """Return endless placeholders; the length of an epoch follows from ``records_per_epoch``, if configured."""
        return _Batches(self._find_epoch_length())

    def build_validation_data_loader(self) -> Any:
        """Return one placeholder: a validation is one call of :meth:`evaluate_batch`."""
        return [{}]

    def _find_epoch_length(self) -> int | None:
        settings = self._run.settings
        records = (settings.exp_conf or {}).get("records_per_epoch")
        if not records or settings.per_slot_batch_size is None:
            return None
        return max(1, int(records) // settings.get_global_batch_size())

    def get_batch_length(self, batch: Any) -> int:
        """Return the batch size per slot, or 1 if ``hparams`` has no ``global_batch_size``."""
        return self._run.settings.per_slot_batch_size or 1

    # Checkpoints

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return the callback that passes events of the run to the adapter."""
        return {"det_lightning.estimator": _AdapterEvents(self)}

    def collect_files(self) -> pathlib.Path | None:
        """Return a directory with the model, SavedModels and the state of each rank on the chief; None elsewhere."""
        if self._session is None:
            self.begin_training()
        assert self._session is not None
        own = pathlib.Path(tempfile.mkdtemp(dir=self._root))
        self._session.save_rank(own)
        of_ranks = self._run.distributed.allgather({path.name: path.read_bytes() for path in sorted(own.iterdir())})
        if self._run.distributed.rank != 0:
            return None
        directory = pathlib.Path(tempfile.mkdtemp(dir=self._root))
        path = self._session.save_model(directory, with_graph=True)
        for rank, files in enumerate(of_ranks):
            of_rank = directory / _files.RANKS_DIR / str(rank)
            of_rank.mkdir(parents=True)
            for name, content in files.items():
                (of_rank / name).write_bytes(content)
        _files.write_rng(directory, self._estimator.config.tf_random_seed)
        for name, function in self._parts.serving_input_receiver_fns.items():
            self._estimator.export_saved_model(str(directory / name), function, checkpoint_path=path)
        return directory

    def describe_files(self) -> dict[str, str]:
        """Return ``framework``, with the version of TensorFlow, and ``format`` for ``metadata.json``."""
        return {"framework": f"tensorflow-{tf.__version__}", "format": "saved_model"}

    def report_checkpoint(self, directory: str) -> None:
        """Call the ``on_checkpoint_end`` of the trial's hooks, which may add files to the checkpoint."""
        for hook in self._parts.run_hooks():
            hook.on_checkpoint_end(directory)


class _AdapterEvents(PyTorchCallback):
    """Passes the events of a run to the adapter."""

    def __init__(self, adapter: EstimatorAdapter) -> None:
        self._adapter = adapter

    def on_training_start(self) -> None:
        self._adapter.begin_training()

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self._adapter.report_checkpoint(checkpoint_dir)

    def on_trial_shutdown(self) -> None:
        self._adapter.end_run()


class _Batches:
    """Endless placeholders for batches, since the graph reads the data; ``length`` is that of an epoch, if known."""

    def __init__(self, length: int | None) -> None:
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of batches of an epoch is unknown: the configuration has no records_per_epoch.")
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield {}


def adapt_class(trial_class: type[EstimatorTrial]) -> type[EstimatorAdapter]:
    """Return an adapter class for a trial class, with the name and the documentation of the trial class."""
    adapter: type[EstimatorAdapter] = type(
        trial_class.__name__,
        (EstimatorAdapter,),
        {
            "trial_class": trial_class,
            "__module__": trial_class.__module__,
            "__qualname__": trial_class.__qualname__,
            "__doc__": trial_class.__doc__,
        },
    )
    return adapter
