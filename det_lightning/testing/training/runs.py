"""The runs that the checks of a trial look at, each made once, when it is first needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

from det_lightning.testing.checks import BadTrial, CheckFailed, NotChecked
from det_lightning.testing.observation.context_bypass import ContextBypass, zero_grad_noted
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.training.execution import Run, RunPlan, train, train_under_lightning
from det_lightning.testing.training.reference import Conversion, compare_with_reference, record_ours
from det_lightning.testing.training.requirements import arguments_of, explain_failure
from det_lightning.testing.training.trial_source import ImportedTrial, TrialSource


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The boundaries of a run of a few batches, one of each kind; None if the data have no boundary of that kind."""

    batches: int  # length of the run
    epoch_limit: int | None  # epochs are cut to this; None if they are short enough, or do not end
    mid_epoch: int | None  # a checkpoint between two batches of an epoch, with nothing else
    epoch_end: int | None  # a checkpoint at the end of an epoch
    after_validation: int  # a checkpoint right after a validation

    @classmethod
    def of(cls, batches: int, epoch_length: int | None) -> Boundaries:
        """Return the boundaries of a run of at least 6 batches; ``epoch_length`` is None for an endless loader."""
        longest = max(2, (batches - 2) // 2)
        if epoch_length is None:
            return cls(batches, None, 2, None, longest)
        epoch = min(epoch_length, longest)
        mid = None if epoch == 1 else epoch // 2
        return cls(batches, longest if epoch_length > longest else None, mid, epoch, epoch + max(1, epoch // 2 - 1) + 1)

    def applied_to(self, plan: RunPlan) -> RunPlan:
        """Return the plan with these boundaries, and with a checkpoint within an aggregation if it has one."""
        within = self.mid_aggregation(plan.settings.aggregation_frequency)
        checkpoints = {self.mid_epoch, self.epoch_end, self.after_validation, within}
        limits = {} if self.epoch_limit is None else {"limit_train_batches": self.epoch_limit}
        return dataclasses.replace(
            plan,
            validate_after=frozenset({self.after_validation}),
            checkpoint_after=frozenset(batch for batch in checkpoints if batch is not None),
            limits={"limit_val_batches": 4, **limits},
        )

    def mid_aggregation(self, frequency: int) -> int | None:
        """Return a number of batches that does not complete an update of ``frequency`` batches."""
        if frequency == 1:
            return None
        return frequency + 1 if frequency + 1 < self.batches else 1


class TrialRuns:
    """The runs of one trial, which is imported from ``options.spec`` unless there is a ``source``."""

    def __init__(self, options: TrialOptions, source: TrialSource | None = None) -> None:
        self.options = options
        self.source = source or ImportedTrial(options.spec, options.directory)
        self._resumed: dict[tuple[int, int], Run] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="det_lightning-", ignore_cleanup_errors=True)

    def close(self) -> None:
        self._folder.cleanup()

    @functools.cached_property
    def settings(self) -> RunSettings:
        options = self.options
        return RunSettings(
            hparams=options.hparams or {},
            config=options.config,
            arguments=arguments_of(self.source, options.hparams, options.arguments),
            batches=options.batches,
            seed=options.seed,
            validation_period=max(1, options.batches // 2),
            reporting_period=100,
            aggregation_frequency=int(options.configured("optimizations").get("aggregation_frequency") or 1),
        )

    @property
    def reference_settings(self) -> RunSettings:
        """The settings of the runs that are compared with a reference."""
        return dataclasses.replace(self.settings, reporting_period=5)

    @property
    def aggregation_frequency(self) -> int:
        """Number of batches per update in :attr:`aggregated`: as configured, but at least two."""
        return max(2, self.settings.aggregation_frequency)

    def plan(self, name: str, settings: RunSettings | None = None, **options: Any) -> RunPlan:
        """Return the plan of a run, with its own directory."""
        return RunPlan(name, settings or self.settings, Path(self._folder.name) / name / "checkpoints", **options)

    @functools.cached_property
    def probe(self) -> tuple[Run, ContextBypass]:
        """Two epochs of two batches, under an observation that is too slow for the other runs."""
        observer = Observer()
        bypass = ContextBypass(self.source.directory, observer)
        plan = self.plan(
            "a run of four batches",
            dataclasses.replace(self.settings, batches=4),
            validate_after=frozenset({2}),
            limits={"limit_train_batches": 2, "limit_val_batches": 1},
            around=bypass.noted,
        )
        return train(self.source, plan, observer), bypass

    @functools.cached_property
    def boundaries(self) -> Boundaries:
        """The boundaries of all other runs; arbitrary ones if the trial does not begin to train."""
        run, _ = self.probe
        return Boundaries.of(self.options.batches, run.observer.epoch_length)

    def _trained(self, plan: RunPlan) -> Run:
        return train(self.source, self.boundaries.applied_to(plan), Observer(self.source.modules))

    @functools.cached_property
    def straight(self) -> Run:
        return self._trained(self.plan("the first run"))

    @functools.cached_property
    def again(self) -> Run:
        return self._trained(self.plan("the second run"))

    @functools.cached_property
    def under_lightning(self) -> Run:
        return train_under_lightning(self.source, self.boundaries.applied_to(self.plan("pl.Trainer")), Observer())

    @functools.cached_property
    def aggregated(self) -> tuple[Run, dict[str, None]]:
        """A run with several batches per update, and where the trial clears gradients that an update still needs."""
        cleared: dict[str, None] = {}
        observer = Observer()
        frequency = self.aggregation_frequency
        settings = dataclasses.replace(self.settings, aggregation_frequency=frequency)
        noted = functools.partial(zero_grad_noted, self.source.directory, observer, frequency, cleared)
        plan = self.boundaries.applied_to(self.plan("the uninterrupted run", settings, around=noted))
        return train(self.source, plan, observer), cleared

    def resumed(self, run: Run, batches: int) -> Run:
        """Return a run that resumes from the checkpoint of ``run`` after ``batches`` batches."""
        key = (id(run), batches)
        if key not in self._resumed:
            plan = dataclasses.replace(
                run.plan,
                name="the resumed run",
                storage=self.plan(f"resumed-{len(self._resumed)}").storage,
                resume_from=run.checkpoints[batches],
                trusted=True,  # it was written here
                around=contextlib.nullcontext,
            )
            self._resumed[key] = train(self.source, plan, Observer(self.source.modules, watches=True))
        return self._resumed[key]

    @functools.cached_property
    def conversion(self) -> Conversion:
        """The trial beside its reference; raises NotChecked or BadTrial if it has none."""
        return compare_with_reference(self.options, self.source, self.reference_settings)

    def records_to_show(self) -> tuple[dict[str, TrainingRecord], Difference | None]:
        """Return the records of the ``"reference"``, if there is one, and of ``"ours"``, and their first difference."""
        try:
            reference, ours, difference = self.conversion
        except (BadTrial, NotChecked):
            return {"ours": record_ours(self.source, self.reference_settings)}, None
        return {"reference": reference, "ours": ours}, difference

    def require(self, run: Run) -> Run:
        """Return the run; raises NotChecked if it failed, which another check reports."""
        if run.failure is not None:
            raise NotChecked(f"the trial fails {run.failure.stage} ({run.failure.reason})")
        return run

    def succeeded(self, run: Run) -> Run:
        """Return the run; raises BadTrial or CheckFailed, which explain the failure, if it failed."""
        if run.failure is None:
            return run
        if explanation := explain_failure(self.source, self.settings, run.failure):
            raise BadTrial(explanation)
        raise CheckFailed(f"{self.source.name} fails {run.failure.description}")
