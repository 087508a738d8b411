"""The runs that the checks of a trial look at: each is made when it is first needed, and once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

from det_lightning.testing.observation.attribute_access import AttributeAccess
from det_lightning.testing.observation.context_bypass import ContextBypass, bypasses_noted, cleared_gradients_noted
from det_lightning.testing.observation.object_state import StateReader
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, CheckFailed, NotChecked
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.training.execution import Run, train, train_under_lightning
from det_lightning.testing.training.plans import Boundaries, RunPlan
from det_lightning.testing.training.reference import Conversion, compare_with_reference, record_ours
from det_lightning.testing.training.requirements import arguments_of, explain_failure
from det_lightning.testing.training.trial_source import ImportedTrial, TrialSource


class TrialRuns:
    """The runs of one trial.

    Args:
        options: which trial, and how it is trained.
        source: where its class comes from; by default ``options.spec`` is imported.

    Attributes:
        options: as given.
        source: of the trial's class.
        cleared_gradients: where the trial clears gradients that an update still needs, as :attr:`aggregated` found.
    """

    def __init__(self, options: TrialOptions, source: TrialSource | None = None) -> None:
        self.options = options
        self.source = source or ImportedTrial(options.spec, options.directory)
        self.cleared_gradients: dict[str, None] = {}
        self._resumed: dict[tuple[int, int], Run] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="det_lightning-", ignore_cleanup_errors=True)

    def close(self) -> None:
        """Remove the checkpoints of the runs."""
        self._folder.cleanup()

    @functools.cached_property
    def settings(self) -> RunSettings:
        """What all runs depend on."""
        options = self.options
        return RunSettings(
            hparams=options.hparams or {},
            config=options.config,
            arguments=arguments_of(self.source, options.hparams, options.arguments),
            batches=options.batches,
            seed=options.seed,
            validation_period=max(1, options.batches // 2),
            reporting_period=100,
            aggregation_frequency=options.aggregation_frequency,
        )

    @property
    def reference_settings(self) -> RunSettings:
        """What the runs beside a reference depend on."""
        return dataclasses.replace(self.settings, reporting_period=5)

    def plan(self, name: str, settings: RunSettings | None = None, **options: Any) -> RunPlan:
        """Return the plan of a run, with a directory of its own."""
        return RunPlan(name, settings or self.settings, Path(self._folder.name) / name / "checkpoints", **options)

    @functools.cached_property
    def probe(self) -> tuple[Run, ContextBypass]:
        """Two epochs of two batches, watched by what is too slow for the other runs."""
        bypass = ContextBypass(self.source.directory)
        observer = Observer()
        plan = self.plan(
            "a run of four batches",
            dataclasses.replace(self.settings, batches=4),
            validate_after=frozenset({2}),
            epoch_limit=2,
            validation_batches=1,
            around=lambda: bypasses_noted(bypass, observer),
        )
        return train(self.source, plan, observer), bypass

    @functools.cached_property
    def boundaries(self) -> Boundaries:
        """What the runs do when; where the trial does not even begin to train it does not matter."""
        run, _ = self.probe
        return Boundaries.of(self.options.batches, run.observer.epoch_length)

    @functools.cached_property
    def straight(self) -> Run:
        """A run from beginning to end."""
        plan = self.boundaries.applied_to(self.plan("the first run"))
        return train(self.source, plan, Observer(StateReader(self.source.modules)))

    @functools.cached_property
    def again(self) -> Run:
        """The same once more."""
        plan = self.boundaries.applied_to(self.plan("the second run"))
        return train(self.source, plan, Observer(StateReader(self.source.modules)))

    @functools.cached_property
    def under_lightning(self) -> Run:
        """The same run by Lightning's API."""
        return train_under_lightning(self.source, self.boundaries.applied_to(self.plan("pl.Trainer")), Observer())

    @property
    def aggregation_frequency(self) -> int:
        """Number of batches of an update in :attr:`aggregated`: two, unless the configuration says more."""
        return max(2, self.options.aggregation_frequency)

    @functools.cached_property
    def aggregated(self) -> Run:
        """A run in which several batches make an update; fills :attr:`cleared_gradients`."""
        observer = Observer()
        frequency = self.aggregation_frequency
        settings = dataclasses.replace(self.settings, aggregation_frequency=frequency)
        noted = functools.partial(
            cleared_gradients_noted, self.source.directory, observer, frequency, self.cleared_gradients
        )
        plan = self.plan("the uninterrupted run", settings, around=noted)
        return train(self.source, self.boundaries.applied_to(plan), observer)

    def resumed(self, run: Run, batches: int) -> Run:
        """Return a run that goes on from the checkpoint of ``run`` after so many batches."""
        key = (id(run), batches)
        if key not in self._resumed:
            storage = self.plan(f"resumed-{len(self._resumed)}").storage
            plan = dataclasses.replace(
                run.plan,
                name="the resumed run",
                storage=storage,
                resume_from=run.checkpoints[batches],
                trusted=True,  # it was written here
                around=contextlib.nullcontext,
            )
            observer = Observer(StateReader(self.source.modules), AttributeAccess())
            self._resumed[key] = train(self.source, plan, observer)
        return self._resumed[key]

    @functools.cached_property
    def conversion(self) -> Conversion:
        """The trial beside its reference.

        Raises:
            NotChecked: there is no reference.
            BadTrial: it cannot be used.
        """
        return compare_with_reference(self.options, self.source, self.reference_settings)

    def own_record(self) -> TrainingRecord:
        """Record the trial on det_lightning, as beside a reference."""
        return record_ours(self.source, self.reference_settings)

    def require_importable(self) -> None:
        """Import the trial; raise BadTrial, which says why, if that does not work."""
        with self.source.imported():
            pass

    def require(self, run: Run) -> Run:
        """Return the run if it came to its end.

        Raises:
            NotChecked: it did not; says when, and in one line why. It is for another check to fail because of it.
        """
        if run.failure is not None:
            raise NotChecked(f"the trial fails {run.failure.stage} ({run.failure.reason})")
        return run

    def explained(self, run: Run) -> Exception:
        """Return the error for a run that failed, with all that can be said."""
        assert run.failure is not None
        explanation = explain_failure(self.source, self.settings, run.failure)
        if explanation:
            return BadTrial(explanation)
        return CheckFailed(f"{self.source.name} fails {run.failure.description}")
