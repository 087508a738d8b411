"""What only Determined's master knew about checkpoints, put together from outputs of its command line."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import MASTER_KEY
from det_lightning.checkpoint.format.master_output import (
    Checkpoint,
    ExperimentDescription,
    Printed,
    TrialDescription,
    read_output,
)
from det_lightning.masking import mask

_NUMBERS = {"nan": float("nan"), "infinity": float("inf"), "-infinity": float("-inf")}


@dataclasses.dataclass(frozen=True)
class ExportedCheckpoint:
    """What the files say about a checkpoint; fields that they do not mention are None."""

    checkpoint_id: str
    file: str  # the first that names it
    trial_id: int
    experiment_id: int
    steps_completed: int | None = None
    is_deleted: bool = False
    time_s: float | None = None  # when it was reported, in seconds since 1970
    metrics: dict[str, Any] | None = None  # of the validation at the same batch
    searcher_metric: float | None = None


class MasterExport:
    """What one or more outputs of the command line say together.

    Args:
        files: the content of each file, by its name.

    Raises:
        ValueError: a file is not such an output, or two contradict each other; the message lists all mistakes with
            file, key and value.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.checkpoints: dict[str, ExportedCheckpoint] = {}
        self._experiments: dict[int, dict[str, Any]] = {}
        self._trials: dict[int, dict[str, Any]] = {}
        self._mistakes: list[str] = []
        for name, content in files.items():
            for printed in read_output(name, content, self._mistakes):
                self._add(name, printed)
        if self._mistakes:
            raise ValueError("; ".join(self._mistakes))

    def metric_of(self, checkpoint: ExportedCheckpoint) -> dict[str, Any] | None:
        """Return name, value and direction of a checkpoint's searcher metric; None if it is not known."""
        searcher = (self._experiments.get(checkpoint.experiment_id, {}).get("config") or {}).get("searcher")
        if not isinstance(searcher, dict) or not isinstance(name := searcher.get("metric"), str):
            return None
        value = _number((checkpoint.metrics or {}).get(name))
        value = checkpoint.searcher_metric if value is None else value
        smaller_is_better = searcher.get("smaller_is_better") is not False
        return None if value is None else {"name": name, "value": value, "smaller_is_better": smaller_is_better}

    def entries_for(self, checkpoint: ExportedCheckpoint) -> dict[str, Any]:
        """Return the entries to add to the ``metadata.json`` of a checkpoint, with secrets masked."""
        experiment = self._experiments.get(checkpoint.experiment_id, {})
        trial = self._trials.get(checkpoint.trial_id, {})
        entries = {
            "trial": str(checkpoint.trial_id),
            "experiment": str(checkpoint.experiment_id),
            "metric": self.metric_of(checkpoint),
            "hparams": mask(trial.get("hparams")),
            MASTER_KEY: {
                "experiment": {key: experiment.get(key) for key in ("name", "state", "start_time")},
                "trial": {"state": trial.get("state")},
                "validation_metrics": checkpoint.metrics,
            },
        }
        return {key: value for key, value in entries.items() if value is not None}

    def config_of(self, checkpoint: ExportedCheckpoint) -> dict[str, Any] | None:
        """Return the configuration of a checkpoint's experiment, with secrets masked; None if it is not known."""
        masked: dict[str, Any] | None = mask(self._experiments.get(checkpoint.experiment_id, {}).get("config"))
        return masked

    def experiments_without_metric(self) -> list[int]:
        """Return the ids of the experiments whose configuration, and so searcher metric, is in no file."""
        ids = {checkpoint.experiment_id for checkpoint in self.checkpoints.values()}
        return sorted(one for one in ids if not self._experiments.get(one, {}).get("config"))

    def experiments_without_checkpoints(self) -> list[int]:
        """Return the ids of the experiments that are described, but whose checkpoints no file mentions."""
        ids = {checkpoint.experiment_id for checkpoint in self.checkpoints.values()}
        return sorted(self._experiments.keys() - ids)

    def _add(self, file: str, printed: Printed) -> None:
        if isinstance(printed, ExperimentDescription):
            config = printed.config or printed.experiment.config
            _merge(self._experiments, printed.experiment.id, printed.experiment.model_dump() | {"config": config})
        elif isinstance(printed, TrialDescription):
            _merge(self._trials, printed.trial.id, printed.trial.model_dump())
            for checkpoint in _of_trial(file, printed):
                self._add_checkpoint(checkpoint)
        elif isinstance(printed, Checkpoint):
            self._add_listed(file, printed)

    def _add_listed(self, file: str, listed: Checkpoint) -> None:
        training = listed.training
        _merge(self._experiments, training.experiment_id, {"config": training.experiment_config})
        _merge(self._trials, training.trial_id, {"hparams": training.hparams})
        steps = listed.metadata.get("steps_completed")
        self._add_checkpoint(
            ExportedCheckpoint(
                checkpoint_id=listed.uuid,
                file=file,
                trial_id=training.trial_id,
                experiment_id=training.experiment_id,
                steps_completed=steps if type(steps) is int else None,
                is_deleted=_is_deleted(listed.state),
                time_s=_moment(listed.report_time),
                metrics=None if training.validation_metrics is None else training.validation_metrics.avg_metrics,
                searcher_metric=_number(training.searcher_metric),
            )
        )

    def _add_checkpoint(self, found: ExportedCheckpoint) -> None:
        known = self.checkpoints.setdefault(found.checkpoint_id, found)
        for field in ("experiment_id", "trial_id", "steps_completed"):
            one = getattr(known, field)
            other = getattr(found, field)
            if None not in (one, other) and one != other:
                self._mistakes.append(
                    f"{found.file}: {field} of checkpoint {found.checkpoint_id!r:.80} is {other}, but {known.file} "
                    f"says {one}"
                )
        unknown = [field.name for field in dataclasses.fields(known) if getattr(known, field.name) is None]
        self.checkpoints[found.checkpoint_id] = dataclasses.replace(
            known, **{name: getattr(found, name) for name in unknown}
        )


def _merge(known: dict[int, dict[str, Any]], number: int, described: dict[str, Any]) -> None:
    """Add the description of an experiment or a trial to what is known."""
    known.setdefault(number, {}).update({key: value for key, value in described.items() if value is not None})


def _of_trial(file: str, printed: TrialDescription) -> Iterator[ExportedCheckpoint]:
    validations = {one.validation.total_batches: one.validation for one in printed.workloads if one.validation}
    for checkpoint in (one.checkpoint for one in printed.workloads):
        if checkpoint is None or checkpoint.uuid is None:
            continue
        validation = validations.get(checkpoint.total_batches)
        yield ExportedCheckpoint(
            checkpoint_id=checkpoint.uuid,
            file=file,
            trial_id=printed.trial.id,
            experiment_id=printed.trial.experiment_id,
            steps_completed=checkpoint.total_batches,
            is_deleted=_is_deleted(checkpoint.state),
            time_s=_moment(checkpoint.end_time),
            metrics=None if validation is None or validation.metrics is None else validation.metrics.avg_metrics,
        )


def _is_deleted(state: str | None) -> bool:
    return state is not None and state.removeprefix("STATE_") == "DELETED"


def _number(value: Any) -> float | None:
    """Return a metric, which the command line prints as text if it is not finite."""
    if isinstance(value, str):
        return _NUMBERS.get(value.lower())
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _moment(text: str | None) -> float | None:
    """Return the time of an RFC 3339 text, in seconds since 1970."""
    if text is None:
        return None
    # Python 3.10 reads neither a Z nor nanoseconds.
    seconds, _, rest = text.removesuffix("Z").partition(".")
    try:
        moment = datetime.datetime.fromisoformat(f"{seconds}.{rest[:6]:0<6}" if rest else seconds)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp()
