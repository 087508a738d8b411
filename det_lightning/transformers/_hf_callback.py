"""``DetCallback``: connects a ``transformers.Trainer`` with the Core API."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from det_lightning.core._context import Context
from det_lightning.core._task import current_task
from det_lightning.escaping import get_logger
from det_lightning.files.strict_json import to_json
from det_lightning.missing_parts import how_to_install

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        f"DetCallback needs transformers: {how_to_install('transformers')}.", name="transformers"
    ) from error

logger = get_logger(__name__)

_SPEEDS = ("_runtime", "_per_second", "_compilation_time")


class DetCallback(TrainerCallback):
    """Reports the metrics of a ``transformers.Trainer``, uploads and restores checkpoints, and ends when preempted.

    In a trial of ``det-lightning run`` metrics and checkpoints belong to the experiment. Elsewhere metrics become
    TensorBoard files and checkpoints go to the storage of ``core.init()``.

    To continue a run, the callback downloads the newest checkpoint to ``args.output_dir`` and sets
    ``args.resume_from_checkpoint``; call ``trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)``.

    Args:
        core_context: the context of ``core.init()``, inside the ``with`` block.
        args: the same arguments as the trainer's.
        filter_metrics: parts of names of metrics: only matching metrics, and the metrics of the search, are reported.
            None reports all.
        user_data: JSON-serializable data, written to ``my_data.json`` in each checkpoint.

    Attributes:
        info: the trial of an experiment; None elsewhere.
        searcher_metric: the validation metric to search by; None outside of an experiment.
        time_metric: the metric for the length of the training, if the configuration names such a metric.

    Raises:
        ValueError: the configuration of the experiment and ``args`` have different lengths.
        CheckpointNotFound, StorageError: the newest checkpoint cannot be downloaded.
    """

    def __init__(
        self,
        core_context: Context,
        args: TrainingArguments,
        filter_metrics: Iterable[str] | None = None,
        user_data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.core_context = core_context
        self.info = core_context.info
        self.filter_metrics = None if filter_metrics is None else list(filter_metrics)
        self.user_data = user_data
        self.last_train_metrics = -1
        self.last_eval_metrics = -1
        self.last_save = -1
        self.last_progress = 0
        # Scripts set these to False if they want no evaluation or checkpoint at the end of the training.
        self._force_final_save = True
        self._force_final_evaluate = True
        self._preempted = False
        self._resumes_from: str | None = None
        self.searcher_metric: str | None = None
        self.time_metric: str | None = None
        self._follow_experiment(args)
        self.load_last_checkpoint(args)

    def load_last_checkpoint(self, args: TrainingArguments) -> None:
        """Download the newest checkpoint of the trial, and set ``args.resume_from_checkpoint``.

        Do nothing without a checkpoint, or with ``overwrite_output_dir`` of older releases of transformers.
        """
        newest = None if self.info is None else self.info.latest_checkpoint
        if newest is None:
            return
        if getattr(args, "overwrite_output_dir", False):
            logger.info("overwrite_output_dir is set: the training does not resume from checkpoint %s.", newest)
            return
        # All ranks get all files: DeepSpeed also reads the shards of other ranks.
        self.core_context.checkpoint.download(newest, args.output_dir)
        steps = self.core_context.checkpoint.get_metadata(newest).get("steps_completed")
        named = Path(args.output_dir, f"checkpoint-{steps}")
        # The directory may hold newer checkpoints of another run.
        path = str(named) if named.is_dir() else get_last_checkpoint(args.output_dir)
        args.resume_from_checkpoint = path
        self._resumes_from = path
        logger.info("The newest checkpoint, %s, is in %s.", newest, path)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn if the training ignores a downloaded checkpoint; begin to watch for preemption."""
        if self._resumes_from is not None and state.global_step == 0:
            logger.warning(
                "The trial has a checkpoint, %s, and the training begins without it: call "
                "trainer.train(resume_from_checkpoint=args.resume_from_checkpoint).",
                self._resumes_from,
            )
        self._end_if_preempted(control)  # from the first call on the signal is handled

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report training and validation metrics, once a batch each; log a warning for metrics of a test.

        Raise a ValueError if a validation lacks metrics needed by the search.
        """
        if logs is None:
            logger.warning("The Trainer has logged nothing after %d batches.", state.global_step)
            return
        kind = get_metric_type(logs)
        # At the end of a training the Trainer logs, and a script may evaluate, once more after the same batch.
        if kind == TRAIN and self.last_train_metrics != state.global_step:
            self.last_train_metrics = state.global_step
            self._report_metrics("training", logs, state)
        elif kind == EVAL and self.last_eval_metrics != state.global_step:
            self.last_eval_metrics = state.global_step
            self._report_metrics("validation", logs, state)
        elif kind == TEST:
            logger.warning("Metrics of a test are not reported: %s.", ", ".join(logs))
        self._end_if_preempted(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the progress, for each percent of ``max_steps``; end the training if preempted."""
        if state.is_world_process_zero and args.max_steps > -1:
            percent = int(state.global_step / args.max_steps * 100)
            if percent > self.last_progress:
                self.last_progress = percent
                self._report_progress(state.global_step / args.max_steps)
        if self.core_context.distributed.size == 1:  # several processes would have to exchange messages at every step
            self._end_if_preempted(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request an evaluation and a checkpoint at the end of the last epoch; report the progress in epochs."""
        if self._is_last(args, state, control):
            # Do not evaluate or save the same batch twice. A preempted trial evaluates when it is resumed.
            if state.global_step > self.last_eval_metrics and self._force_final_evaluate and not self._preempted:
                control.should_evaluate = True
            if state.global_step > self.last_save and (self._force_final_save or self._preempted):
                control.should_save = True
        if state.is_world_process_zero and args.max_steps == -1:
            self._report_progress(state.epoch / args.num_train_epochs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Upload the checkpoint of the trainer, in shards of all ranks, with ``steps_completed`` as metadata."""
        self.last_save = state.global_step
        folder = f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and self.user_data is not None:
            self._on_save_user_data(str(Path(args.output_dir, folder)))
        metadata = {"steps_completed": state.global_step}
        if self.info is not None and self.info.task_type == "TRIAL":
            metadata["trial_id"] = self.info.trial.trial_id
        # TensorBoard's files, in runs/, are written by the first process only, and may grow meanwhile.
        chosen = (f"{folder}/", "runs/") if state.is_world_process_zero else (f"{folder}/",)
        self.core_context.checkpoint.upload(
            args.output_dir, metadata=metadata, shard=True, selector=lambda path: path.startswith(chosen)
        )

    def _on_save_user_data(self, save_path: str) -> None:
        """Write ``user_data`` into the directory of a checkpoint. Override to write other files."""
        Path(save_path, "my_data.json").write_text(to_json(self.user_data), encoding="utf-8")

    def _follow_experiment(self, args: TrainingArguments) -> None:
        task = current_task()
        if task is None:
            return
        searcher = task.config["searcher"]
        if args.max_steps > -1:
            _require_length(searcher, "batches", args.max_steps, "--max_steps")
        else:
            _require_length(searcher, "epochs", args.num_train_epochs, "--num_train_epochs")
        self.searcher_metric = searcher.get("metric")
        self.time_metric = searcher.get("time_metric")
        if self.filter_metrics:
            self.filter_metrics += [name for name in (self.searcher_metric, self.time_metric) if name]
        if searcher["name"] != "single" and Path.cwd() not in Path(args.output_dir).resolve().parents:
            logger.warning(
                "output_dir=%s is not below the trial's working directory: trials that run at the same time on this "
                "machine overwrite each other's checkpoints there. Pass a relative path, or a path with the number of "
                "the trial.",
                args.output_dir,
            )

    def _report_metrics(
        self, group: Literal["training", "validation"], logs: Mapping[str, Any], state: TrainerState
    ) -> None:
        if not state.is_world_process_zero:
            return
        metrics = {name: value for name, value in logs.items() if self._is_reported(name)}
        # The values in the Trainer's logs are rounded.
        for name, value in (("batches", state.global_step), ("epochs", state.epoch)):
            if value is not None:  # there is no epoch before a training
                metrics.setdefault(name, value)
        if group == "validation":
            fields = {"searcher.metric": self.searcher_metric, "searcher.time_metric": self.time_metric}
            _require_metrics(metrics, fields)
        self.core_context.train.report_metrics(group, state.global_step, metrics)

    def _is_reported(self, name: str) -> bool:
        if name == "epoch" or name.endswith(_SPEEDS):
            return False
        return not self.filter_metrics or any(part in name for part in self.filter_metrics)

    def _report_progress(self, progress: float) -> None:
        # A fraction of an epoch is rounded up to whole batches.
        self.core_context.train.report_progress(min(1.0, progress))

    def _end_if_preempted(self, control: TrainerControl) -> None:
        # Stopping makes this epoch the last, with one checkpoint at the end.
        if self.core_context.preempt.should_preempt():
            self._preempted = True
            control.should_training_stop = True

    @staticmethod
    def _is_last(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
        """Return whether no epoch follows."""
        if control.should_training_stop:
            return True
        if args.max_steps > -1:
            return bool(state.global_step >= args.max_steps)
        return bool(state.epoch >= args.num_train_epochs)


EVAL = "eval_"
TEST = "test_"
TRAIN = "train_"


def get_metric_type(d: Mapping[str, Any]) -> str:
    """Return the kind of the metrics of a log, by the prefixes of names: ``EVAL``, ``TEST`` or ``TRAIN``."""
    for prefix in (EVAL, TEST):
        if any(name.startswith(prefix) for name in d):
            return prefix
    return TRAIN


def _require_length(searcher: Mapping[str, Any], unit: str, length: float, argument: str) -> None:
    """Raise a ValueError if the section ``searcher`` has another length than the trainer, or a length without a unit.

    The trainer's ``argument`` has the ``length`` in the ``unit`` ``"batches"`` or ``"epochs"``.
    """
    trained = f"{argument} {length:g} makes the trainer train {length:g} {unit}"
    max_length = searcher.get("max_length")
    if isinstance(max_length, Mapping):
        if dict(max_length) != {unit: length}:
            raise ValueError(
                f"searcher.max_length is {dict(max_length)}, and {trained}. Remove searcher.max_length, which is "
                "deprecated, or set the same length in both."
            )
    elif max_length is not None:
        raise ValueError(
            f"searcher.max_length is {max_length}, without a unit, and {trained}. Remove searcher.max_length, which "
            f"is deprecated: {argument} says how long the trainer trains."
        )
    elif (clock := searcher.get("time_metric")) in ("batches", "epochs"):
        max_time = searcher.get("max_time")
        if (clock, max_time) != (unit, length):
            raise ValueError(
                f"searcher.max_time is {max_time} with searcher.time_metric: {clock}, and {trained}. Let "
                f"searcher.max_time or {argument} follow the other one, in the same unit."
            )


def _require_metrics(reported: Collection[str], needed: Mapping[str, str | None]) -> None:
    """Raise a ValueError that names all ``needed`` metrics missing from the ``reported`` metrics of an evaluation.

    ``needed`` has the name of a metric, or None, by the field of the configuration.
    """
    missing = [f"{field}: {name}" for field, name in needed.items() if name is not None and name not in reported]
    if missing:
        raise ValueError(
            f"The evaluation lacks metrics of the configuration: {', '.join(missing)}. The evaluation has "
            f"{', '.join(sorted(reported))}. Return the metrics from compute_metrics (the Trainer prefixes eval_), or "
            "change the configuration: searches, retention and the choice of the best checkpoint need the metrics."
        )
