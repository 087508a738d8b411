"""``TrainingSession``, the monitored session of a run, with saving and restoring; and the session's hooks."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from det_lightning import errors
from det_lightning.escaping import get_logger
from det_lightning.estimator._graph import TrainingGraph
from det_lightning.estimator._tensorflow import tf
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

#: File name prefix of the model.
MODEL = "model.ckpt"
# File name prefixes of a rank's position in the data, and of partially aggregated gradients.
_INPUT = "input.ckpt"
_AGGREGATION = "aggregation.ckpt"


class RunHook(tf.estimator.SessionRunHook):
    """A ``tf.estimator.SessionRunHook`` with more events, for ``tf.estimator.TrainSpec(hooks=...)``."""

    def on_checkpoint_load(self, checkpoint_dir: str) -> None:
        """Run on every rank before a run resumes from the checkpoint in the directory ``checkpoint_dir``."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Run on the chief after each checkpoint. Files written to ``checkpoint_dir`` become part of the checkpoint."""

    def on_trial_close(self) -> None:
        """Run when a run of the trial ends, even after an error."""


class StopForwarder(tf.estimator.SessionRunHook):
    """Wraps a hook of the trial, and turns its stop request into one of the run, obeyed at a boundary."""

    def __init__(self, hook: Any, run: PyTorchTrialContext) -> None:
        self._hook = hook
        self._run = run

    def begin(self) -> None:
        self._hook.begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context: Any) -> Any:
        return self._call(run_context, self._hook.before_run)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._call(run_context, self._hook.after_run, run_values)

    def _call(self, run_context: Any, method: Callable[..., Any], *args: Any) -> Any:
        # A stop requested through the session's own context would end the session before the boundary.
        own = tf.estimator.SessionRunContext(run_context.original_args, run_context.session)
        result = method(own, *args)
        if own.stop_requested:
            self._run.set_stop_requested(True)
        return result

    def end(self, session: Any) -> None:
        self._hook.end(session)


class RunCount(tf.estimator.SessionRunHook):
    """Counts the runs of a session, in ``count``."""

    def __init__(self) -> None:
        self.count = 0

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.count += 1


class TrainingSession:
    """Trains batch by batch, and saves and restores the state.

    ``restore_from`` is the path of a TensorFlow checkpoint, without suffixes of files, or None to start from scratch.
    All ranks start with the weights of the chief.
    """

    def __init__(
        self, training: TrainingGraph, hooks: Sequence[Any], restore_from: str | None, distributed: DistributedContext
    ) -> None:
        self._training = training
        config = training.config
        spec = training.spec
        with training.graph.as_default():
            creator = tf.compat.v1.train.ChiefSessionCreator(
                scaffold=spec.scaffold,
                master=config.master,
                config=config.session_config,
                checkpoint_filename_with_path=restore_from,
            )
            self._session = tf.compat.v1.train.MonitoredSession(
                creator, hooks=[_InputInitializer(training), *hooks, tf.estimator.NanTensorHook(spec.loss)]
            )
        if distributed.size > 1 and restore_from is None:
            self._share_weights(distributed)

    def train(self) -> dict[str, Any]:
        """Train on the next batch; return ``loss`` and the scalar summaries by tag."""
        training = self._training
        fetched = self._session.run(
            {"train_op": training.spec.train_op, "loss": training.spec.loss, "scalars": training.scalars}
        )
        return {**_parse_summary(fetched["scalars"]), "loss": fetched["loss"]}

    def save_model(self, directory: pathlib.Path, with_graph: bool) -> str:
        """Write the model; return the path without suffixes of files."""

        def save(step_context: Any) -> Any:
            step = self._training.global_step
            return _save(self._training.saver, step_context.session, str(directory / MODEL), global_step=step)

        path: str = self._session.run_step_fn(save)
        tf.compat.v1.train.update_checkpoint_state(str(directory), pathlib.Path(path).name)
        if with_graph:
            with self._training.graph.as_default():
                self._training.saver.export_meta_graph(f"{path}.meta")
            tf.io.write_graph(self._training.graph.as_graph_def(add_shapes=True), str(directory), "graph.pbtxt")
        return path

    def save_rank(self, directory: pathlib.Path) -> None:
        """Write the state of this rank: aggregated gradients and, if possible, the position in the data."""
        training = self._training

        def save(saver: Any, name: str) -> None:
            self._session.run_step_fn(lambda step_context: _save(saver, step_context.session, str(directory / name)))

        if training.aggregation_saver is not None:
            save(training.aggregation_saver, _AGGREGATION)
        try:
            save(training.input_saver, _INPUT)
        except (tf.errors.OpError, ValueError) as e:
            # A Python function makes the dataset, so a resumed run reads the batches again.
            logger.debug("The position in the dataset cannot be written: %s", e)

    def restore_rank(self, directory: pathlib.Path | None, batches_trained: int) -> None:
        """Restore the data and random operations to the position after ``batches_trained`` batches.

        Without files of :meth:`save_rank` in ``directory``, the batches are read again.
        """
        training = self._training
        has_input = directory is not None and (directory / f"{_INPUT}.index").is_file()
        if training.random_tensors or not has_input:
            self._replay(batches_trained)
        if directory is None:
            return
        if has_input:
            self._restore(training.input_saver, directory / _INPUT)
        if training.aggregation_saver is not None and (directory / f"{_AGGREGATION}.index").is_file():
            self._restore(training.aggregation_saver, directory / _AGGREGATION)

    def _restore(self, saver: Any, path: pathlib.Path) -> None:
        self._session.run_step_fn(lambda step_context: saver.restore(step_context.session, str(path)))

    def _replay(self, batches: int) -> None:
        """Read batches and run random operations, without training."""
        logger.info("%d batches are read again, because data or random operations cannot be restored.", batches)
        fetches = [*tf.nest.flatten(self._training.next_batch), *self._training.random_tensors]
        for _ in range(batches):
            self._fetch(fetches)

    def _fetch(self, fetches: Any) -> Any:
        """Fetch values without running the hooks."""
        return self._session.run_step_fn(lambda step_context: step_context.session.run(fetches))

    def _share_weights(self, distributed: DistributedContext) -> None:
        with self._training.graph.as_default():
            variables = tf.compat.v1.global_variables()
        values = distributed.broadcast(self._fetch(variables) if distributed.rank == 0 else None)
        if distributed.rank == 0:
            return

        def load(step_context: Any) -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.load(value, step_context.session)

        self._session.run_step_fn(load)

    def close(self) -> None:
        """End the session, and notify the trial's hooks."""
        self._session.close()


class _InputInitializer(tf.estimator.SessionRunHook):
    """Initializes the iterator over the dataset once the session exists."""

    def __init__(self, training: TrainingGraph) -> None:
        self._initialize = training.initialize_input

    def after_create_session(self, session: Any, coord: Any) -> None:
        try:
            session.run(self._initialize)
        except tf.errors.OpError as e:
            raise errors.InvalidExperimentException(f"The training dataset cannot be read: {e.message}") from e


def _save(saver: Any, session: Any, path: str, **step: Any) -> Any:
    return saver.save(session, path, write_meta_graph=False, write_state=False, **step)


def _parse_summary(serialized: bytes) -> dict[str, Any]:
    summary = tf.compat.v1.Summary()
    summary.ParseFromString(serialized)
    return {
        value.tag: tf.make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value
        for value in summary.value
        if value.HasField("tensor") or value.HasField("simple_value")
    }
