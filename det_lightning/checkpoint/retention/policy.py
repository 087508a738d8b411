"""Decides when a run saves, which validation is the best, and which checkpoints are kept.

Change here: which checkpoints are deleted is ``choose_to_delete``; ``CheckpointStorage.delete`` deletes one. What
the rule looks at is a field of ``CheckpointRecord``, filled in ``trial_checkpoints.py`` beside this file and in
``experiments/lifecycle.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from det_lightning.units import TrainUnit

_VALIDATIONS = ("best", "all", "none")


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """The properties of a checkpoint that matter to the rule.

    Attributes:
        id: the id.
        trial: name of the trial that wrote the checkpoint.
        steps_completed: number of batches trained on.
        order: a number that grows from one checkpoint of the experiment to the next, such as the time of writing.
        metric: value of the searcher metric; None if there was no validation. NaN counts as none.

    Example:
        >>> from det_lightning.checkpoint import CheckpointRecord
        >>> CheckpointRecord("first", trial="1", steps_completed=100, order=1, metric=0.5).has_metric
        True
        >>> CheckpointRecord("second", trial="1", steps_completed=200, order=2, metric=float("nan")).has_metric
        False
    """

    id: str
    trial: str
    steps_completed: int
    order: float
    metric: float | None = None

    @property
    def has_metric(self) -> bool:
        """Whether there is a metric that can be compared."""
        # Only NaN differs from itself; an integer may be too large for math.isnan().
        return self.metric is not None and self.metric == self.metric


@dataclasses.dataclass(frozen=True)
class Retention:
    """How many checkpoints to keep, as in the ``checkpoint_storage`` section of an experiment configuration.

    Attributes:
        experiment_best: how many of the whole experiment's best to keep.
        trial_best: how many of each trial's best to keep.
        trial_latest: how many of each trial's latest to keep.

    Raises:
        ValueError: a number is negative or not an integer; the message names all such numbers.

    Example:
        >>> from det_lightning.checkpoint import CheckpointRecord, Retention
        >>> records = [
        ...     CheckpointRecord("first", trial="1", steps_completed=100, order=1, metric=0.5),
        ...     CheckpointRecord("second", trial="1", steps_completed=200, order=2, metric=0.25),
        ...     CheckpointRecord("third", trial="1", steps_completed=300, order=3, metric=0.75),
        ... ]
        >>> Retention(trial_best=1, trial_latest=1).choose_to_delete(records)
        ['first']
    """

    experiment_best: int = 0
    trial_best: int = 1
    trial_latest: int = 1

    def __post_init__(self) -> None:
        wrong = {
            f"save_{name}": value
            for name, value in vars(self).items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 0
        }
        if wrong:
            given = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
            raise ValueError(f"The number of checkpoints to keep must be an integer from 0; got {given}.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Retention | None:
        """Return the rule in a ``checkpoint_storage`` section; None if the section has no rule, and all are kept."""
        given = {
            name: config[f"save_{name}"]
            for name in ("experiment_best", "trial_best", "trial_latest")
            if config.get(f"save_{name}") is not None
        }
        return cls(**given) if given else None

    def choose_to_delete(self, records: Iterable[CheckpointRecord], smaller_is_better: bool = True) -> list[str]:
        """Return the ids of the checkpoints that need not be kept, oldest first.

        A checkpoint is kept for a metric among the best of the experiment or of the trial, or as one of the latest of
        the trial. Of two equal metrics the earlier wins.

        Args:
            records: all checkpoints of an experiment.
            smaller_is_better: whether a smaller metric is better.
        """
        by_age = sorted(records, key=lambda record: record.order)
        sign = 1 if smaller_is_better else -1
        best = sorted((r for r in by_age if r.has_metric), key=lambda record: sign * (record.metric or 0))
        kept = {record.id for record in best[: self.experiment_best]}
        for trial in {record.trial for record in by_age}:
            kept.update([r.id for r in best if r.trial == trial][: self.trial_best])
            kept.update([r.id for r in reversed(by_age) if r.trial == trial][: self.trial_latest])
        return [record.id for record in by_age if record.id not in kept]


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """When to save a run, which validation is the best, and which checkpoints to keep.

    Attributes:
        validations: the validations that a checkpoint follows: ``"all"``, ``"best"`` or ``"none"``.
        period: when else checkpoints are due, such as ``Batch(1000)`` or ``Epoch(1)``. A run always ends with one.
        metric: name of the validation metric that ``"best"`` and ``retention`` compare.
        smaller_is_better: whether a smaller value of ``metric`` is an improvement.
        retention: which checkpoints of the trial to keep; None keeps all.

    Raises:
        ValueError: ``validations`` is unknown.

    Example:
        >>> from det_lightning.checkpoint import CheckpointPolicy
        >>> policy = CheckpointPolicy("best", metric="validation_loss")
        >>> policy.improves(0.25, best=0.5), policy.improves(0.5, best=None)
        (True, True)
    """

    validations: str = "best"
    period: TrainUnit | None = None
    metric: str | None = None
    smaller_is_better: bool = True
    retention: Retention | None = None

    def __post_init__(self) -> None:
        if self.validations not in _VALIDATIONS:
            known = ", ".join(_VALIDATIONS)
            raise ValueError(f"checkpoint_policy must be one of {known}; got {self.validations!r}.")

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether a value of the metric is better than the ``best`` so far; any number is better than NaN."""
        sign = 1 if self.smaller_is_better else -1
        return best is None or math.isnan(best) or sign * value < sign * best

    def describe_missing(self, metrics: Mapping[str, Any]) -> str:
        """Return a message that the metrics of a validation lack the metric to compare."""
        value = metrics.get(self.metric or "")
        given = "" if value is None else f", and {self.metric!r} is {value!r}"
        return (
            f"checkpoint policy 'best' compares the validation metric {self.metric!r}, which must be a number; the "
            f"validation returned {sorted(metrics)}{given}."
        )

    def choose_to_delete(self, records: Iterable[CheckpointRecord]) -> list[str]:
        """Return the ids of a trial's checkpoints that need not be kept during the run, oldest first.

        The trial keeps as many of its own best as the whole experiment, whose best are chosen at the end.
        """
        if self.retention is None:
            return []
        best = max(self.retention.trial_best, self.retention.experiment_best)
        rule = dataclasses.replace(self.retention, trial_best=best, experiment_best=0)
        return rule.choose_to_delete(records, self.smaller_is_better)


def find_differences(own: Mapping[str, Any], others: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the names and both values of arguments that are given twice and differ; None counts as not given."""
    pairs = [(name, value, others.get(name)) for name, value in own.items()]
    return [pair for pair in pairs if pair[1] is not None and pair[2] is not None and repr(pair[1]) != repr(pair[2])]


def complete_policy(
    own: Mapping[str, Any], configured: Mapping[str, Any], searcher: Mapping[str, Any]
) -> tuple[CheckpointPolicy, list[str]]:
    """Return the policy of a run, and warnings: the arguments of ``DeterminedCheckpoint`` come before others.

    ``searcher`` is the section of the configuration. It says whether a smaller value of its own metric is better.
    """
    configured = {**configured, "metric": searcher.get("metric")}
    if own["metric"] in (None, configured["metric"]):
        configured["smaller_is_better"] = searcher.get("smaller_is_better")
    given = {name: configured.get(name) if value is None else value for name, value in own.items()}
    validations = given.pop("policy") or "best"
    warnings = []
    if validations == "best" and given["metric"] is None:
        validations = "all"
        warnings.append(
            "checkpoint_policy='best' has no metric to compare, so every validation is followed by a checkpoint. Name "
            'the metric in exp_conf={"searcher": {"metric": ...}}, or in DeterminedCheckpoint(metric=...).'
        )
    if configured.get("policy") == "best":
        del configured["policy"]  # the default, also in the complete configuration of an experiment
    if differences := find_differences(own, configured):
        pairs = ", ".join(f"{name}={value!r} in place of {other!r}" for name, value, other in differences)
        warnings.append(f"DeterminedCheckpoint overrides the experiment configuration: {pairs}.")
    return CheckpointPolicy(validations, **{k: v for k, v in given.items() if v is not None}), warnings
