"""The runs that checks are judged by: each is made when it is first asked for, and once."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from det_lightning.testing.observation.attribute_access import ReadingOrder
from det_lightning.testing.observation.context_bypass import ContextBypass, clearing_of_gradients, watching_context
from det_lightning.testing.observation.object_state import StateReader
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, CheckFailed, NotChecked
from det_lightning.testing.training.boundaries import Boundaries
from det_lightning.testing.training.execution import ObservedRun, RunPlan, TrialSetup, train, train_under_lightning
from det_lightning.testing.training.old_checkpoint import OldCheckpoint
from det_lightning.testing.training.reference import Conversion, compare_with_reference
from det_lightning.testing.training.requirements import arguments_of, explain_failure
from det_lightning.testing.training.trial_source import ImportedTrial, TrialSource

__all__ = ["TrialRuns"]


class TrialRuns:
    """The runs of one trial.

    Args:
        options: which trial, and how it is trained.
        source: where its class comes from; by default ``options.spec`` is imported.

    Attributes:
        options: as given.
        cleared_gradients: where the trial clears gradients that an update still needs.
    """

    def __init__(self, options: TrialOptions, source: TrialSource | None = None) -> None:
        self.options = options
        self._source = source or ImportedTrial(options.spec, options.directory)
        self.cleared_gradients: dict[str, None] = {}
        self._resumed: dict[tuple[int, int], ObservedRun] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="det_lightning-", ignore_cleanup_errors=True)

    def close(self) -> None:
        """Remove the checkpoints of the runs."""
        self._folder.cleanup()

    def storage(self, name: str) -> Path:
        """Return a directory for the checkpoints of a run."""
        return Path(self._folder.name) / name / "checkpoints"

    @functools.cached_property
    def setup(self) -> TrialSetup:
        """What each run builds the trial with."""
        options = self.options
        arguments = arguments_of(self._source, options.hparams, options.arguments)
        return TrialSetup(self._source, options.hparams, options.config, arguments, options.seed)

    # Runs

    @functools.cached_property
    def probe(self) -> tuple[ObservedRun, ContextBypass]:
        """Two epochs of two batches, watched by what is too slow or too curious for the other runs."""
        bypass = ContextBypass(self.setup.source.directory)
        observer = Observer()
        plan = RunPlan(
            4,
            validate_after=frozenset({2}),
            epoch_limit=2,
            validation_batches=1,
            aggregation_frequency=self.options.aggregation_frequency,
        )
        run = train(
            self.setup,
            plan,
            "a run of four batches",
            observer,
            storage=self.storage("probe"),
            around=lambda: watching_context(bypass, observer),
        )
        return run, bypass

    @functools.cached_property
    def boundaries(self) -> Boundaries:
        """What the runs do when.

        Where the trial does not even begin to train it does not matter.
        """
        run, _ = self.probe
        return Boundaries.of(self.options.batches, run.observer.epoch_length)

    def plan(self, aggregation_frequency: int | None = None) -> RunPlan:
        """Return the plan of a whole run."""
        return self.boundaries.plan(aggregation_frequency or self.options.aggregation_frequency)

    @functools.cached_property
    def straight(self) -> ObservedRun:
        """A run from beginning to end."""
        observer = Observer(StateReader(self.setup.source.modules))
        return train(self.setup, self.plan(), "the first run", observer, storage=self.storage("straight"))

    @functools.cached_property
    def again(self) -> ObservedRun:
        """The same once more."""
        observer = Observer(StateReader(self.setup.source.modules))
        return train(self.setup, self.plan(), "the second run", observer, storage=self.storage("again"))

    @functools.cached_property
    def aggregated(self) -> ObservedRun:
        """A run in which several batches make an update; tells of :attr:`cleared_gradients`."""
        observer, directory = Observer(), self.setup.source.directory
        frequency = self.aggregation_frequency
        return train(
            self.setup,
            self.plan(frequency),
            "the uninterrupted run",
            observer,
            storage=self.storage("aggregated"),
            around=lambda: clearing_of_gradients(directory, observer, frequency, self.cleared_gradients),
        )

    @property
    def aggregation_frequency(self) -> int:
        """Number of batches of an update in :attr:`aggregated`: two, unless the configuration says more."""
        return max(2, self.options.aggregation_frequency)

    @functools.cached_property
    def under_lightning(self) -> ObservedRun:
        """The same run through the other door."""
        storage = self.storage("lightning")
        return train_under_lightning(self.setup, self.plan(), "Lightning's door", Observer(), storage=storage)

    @functools.cached_property
    def conversion(self) -> Conversion:
        """The trial beside its reference.

        Raises:
            NotChecked: there is no reference.
            BadTrial: it can not be used.
        """
        return compare_with_reference(self.options, self.setup)

    @functools.cached_property
    def old_checkpoint(self) -> OldCheckpoint:
        """The checkpoint of the options, loaded and validated.

        Raises:
            CheckFailed: it can not be read.
        """
        return OldCheckpoint.open(self.options, self.setup, self.storage)

    def resumed(self, run: ObservedRun, batches: int) -> ObservedRun:
        """Return a run that goes on from the checkpoint of ``run`` after so many batches."""
        key = (id(run), batches)
        if key not in self._resumed:
            self._resumed[key] = train(
                self.setup,
                run.plan,
                "the resumed run",
                Observer(StateReader(self.setup.source.modules), ReadingOrder()),
                storage=self.storage(f"resumed-{len(self._resumed)}"),
                resume_from=run.checkpoints[batches],
                trusted=True,  # it was written here
            )
        return self._resumed[key]

    # Judging

    def require_importable(self) -> None:
        """Import the trial.

        Raises:
            BadTrial: that does not work; says why.
        """
        with self.setup.source.imported():
            pass

    def require(self, run: ObservedRun) -> ObservedRun:
        """Return the run if it came to its end.

        Raises:
            NotChecked: it did not; says when, and in one line why. It is for another check to be broken by it.
        """
        if run.failure is not None:
            raise NotChecked(f"the trial fails {run.failure.stage} ({run.failure.reason})")
        return run

    def explained(self, run: ObservedRun) -> Exception:
        """Return the error for a run that failed, with all that can be said."""
        assert run.failure is not None
        explanation = explain_failure(self.setup, run.failure)
        if explanation:
            return BadTrial(explanation)
        return CheckFailed(f"{self.setup.source.name} fails {run.failure.told}")
