"""The trainings that the checks of a trial compare; each happens once, when it is first needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from det_lightning.testing.checks import BadTrial, CheckFailed, NotCompared
from det_lightning.testing.observation.shortened_data import ShortenedData
from det_lightning.testing.observation.source_scan import TrialCode
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.training.execution import Failure, Run, RunPlan, train
from det_lightning.testing.training.in_processes import (
    HASH_SEED,
    ProcessRuns,
    make_options,
    share_evenly,
    train_in_processes,
    train_two_and_one,
)
from det_lightning.testing.training.reference import Conversion, compare_with_reference
from det_lightning.testing.training.requirements import choose_arguments, explain_failure, read_code
from det_lightning.testing.training.trial_source import ImportedTrial, TrialSource, list_files


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """Where a short run has each kind of boundary; None if the data have no such boundary."""

    batches: int  # length of the run
    epoch_limit: int | None  # the length to cut epochs to; None for short enough or endless epochs
    mid_epoch: int | None  # a checkpoint between two batches of an epoch, with nothing else
    epoch_end: int | None  # a checkpoint at the end of an epoch
    after_validation: int  # a checkpoint right after a validation

    @classmethod
    def place(cls, batches: int, epoch_length: int | None) -> Boundaries:
        """Return the boundaries of a run of at least 6 batches; ``epoch_length`` is None for an endless loader."""
        longest = max(2, (batches - 2) // 2)
        if epoch_length is None:
            return cls(batches, None, 2, None, longest)
        epoch = min(epoch_length, longest)
        mid = None if epoch == 1 else epoch // 2
        return cls(batches, longest if epoch_length > longest else None, mid, epoch, epoch + max(1, epoch // 2 - 1) + 1)

    def apply(self, plan: RunPlan) -> RunPlan:
        """Return the plan with these boundaries, and with a checkpoint within an aggregation if there is any."""
        within = self.mid_aggregation(plan.settings.aggregation_frequency)
        checkpoints = {self.mid_epoch, self.epoch_end, self.after_validation, within}
        limits = {} if self.epoch_limit is None else {"limit_train_batches": self.epoch_limit}
        return dataclasses.replace(
            plan,
            validate_after=frozenset({self.after_validation}),
            checkpoint_after=frozenset(batch for batch in checkpoints if batch is not None),
            data=ShortenedData(epoch_batches=self.epoch_limit),
            limits={"limit_val_batches": 4, **limits},
        )

    def mid_aggregation(self, frequency: int) -> int | None:
        """Return a number of batches that does not complete an update of ``frequency`` batches."""
        if frequency == 1:
            return None
        return frequency + 1 if frequency + 1 < self.batches else 1


#: Indices of epochs and batches at which a trial may change its behaviour, for good or now and then.
LATER = [*((1 + index // 8, index) for index in range(12, 36)), *((10**power, 100**power) for power in range(1, 4))]


class TrialRuns:
    """The runs of a trial, imported from ``options.spec`` unless there is a ``source``."""

    def __init__(self, options: TrialOptions, source: TrialSource | None = None) -> None:
        self.options = options
        self.source = source or ImportedTrial(options.spec, options.directory)
        self._failure_is_told = False
        self._resumed: dict[tuple[int, int], Run] = {}
        self._halved: dict[int, Run] = {}
        self.written: list[str] = []  # files that the very first run wrote
        self._builds_once: bool | None = None  # whether only another process can build the trial; None if unknown
        self._folder = tempfile.TemporaryDirectory(prefix="det_lightning-", ignore_cleanup_errors=True)

    def close(self) -> None:
        self._folder.cleanup()

    @functools.cached_property
    def settings(self) -> RunSettings:
        options = self.options
        return RunSettings(
            hparams=options.hparams or {},
            config=options.config,
            arguments=choose_arguments(self.source, options.hparams, options.arguments),
            batches=options.batches,
            seed=options.seed,
            validation_period=max(1, options.batches // 2),
            reporting_period=100,
            aggregation_frequency=int(options.get_section("optimizations").get("aggregation_frequency") or 1),
        )

    @property
    def reference_settings(self) -> RunSettings:
        """The settings of the runs that are compared with a reference."""
        return dataclasses.replace(self.settings, reporting_period=5)

    @property
    def aggregation_frequency(self) -> int:
        """Number of batches per update in :attr:`aggregated`: as configured, but at least two."""
        return max(2, self.settings.aggregation_frequency)

    def _make_storage(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder.name), "checkpoints")

    def plan(self, name: str, settings: RunSettings | None = None, **options: Any) -> RunPlan:
        """Return the plan of a run, with its own directory."""
        return RunPlan(name, settings or self.settings, self._make_storage(), **options)

    @functools.cached_property
    def code(self) -> TrialCode:
        """The source of the trial."""
        return read_code(self.source)

    def _train(self, plan: RunPlan) -> Run:
        """Train, and in a process of its own if the trial can be built only once in a process."""
        if plan.recorded is None:
            plan = dataclasses.replace(plan, recorded={})
        run = None if self._builds_once else train(self.source, plan)
        if run is not None and (run.was_built or self._is_build_explained(run.failure)):
            return run
        ((alone,),) = train_in_processes(self.source, [([plan], None)])
        self._builds_once = alone.was_built
        return alone if run is None or alone.was_built else run

    def _is_build_explained(self, failure: Failure | None) -> bool:
        """Return whether it is known why the trial cannot be built, so that no other process need try."""
        is_tried = self._builds_once is not None or not isinstance(self.source, ImportedTrial)
        return is_tried or failure is None or explain_failure(self.source, self.settings, failure) is not None

    @functools.cached_property
    def probe(self) -> Run:
        """The very first run: two epochs of two batches."""
        before = list_files((self.source.directory, Path.cwd()))
        run = self._train_shortly()
        after = list_files((self.source.directory, Path.cwd()))
        self.written += [os.path.relpath(path) for path, changed in after.items() if before.get(path) != changed]
        return run

    @functools.cached_property
    def probe_again(self) -> Run:
        """The first run again, with the files that it wrote."""
        return self._train_shortly()

    def _train_shortly(self) -> Run:
        plan = self.plan(
            "a run of four batches",
            dataclasses.replace(self.settings, batches=4),
            validate_after=frozenset({2}),
            data=ShortenedData(epoch_batches=2),
            limits={"limit_train_batches": 2, "limit_val_batches": 1},
        )
        return self._train(plan)

    @functools.cached_property
    def boundaries(self) -> Boundaries:
        """The boundaries of all other runs; arbitrary if the trial does not begin to train."""
        return Boundaries.place(self.options.batches, self.probe.observer.training.batches)

    @functools.cached_property
    def straight(self) -> Run:
        return self._train(self.boundaries.apply(self.plan("the first run", recorded={"reads_state": True})))

    @functools.cached_property
    def again(self) -> Run:
        return self._train(self.boundaries.apply(self.plan("the second run", recorded={"reads_state": True})))

    @functools.cached_property
    def later(self) -> Run:
        """A run whose trial sees the indices of later batches and epochs."""
        settings = dataclasses.replace(self.settings, batches=len(LATER))
        plan = self.plan("a later run", settings, validate_after=frozenset(), limits={"limit_val_batches": 1})
        return self._train(dataclasses.replace(plan, recorded={"indices": LATER}))

    @functools.cached_property
    def aggregation(self) -> Run:
        """A run with several batches per update."""
        settings = dataclasses.replace(self.settings, aggregation_frequency=self.aggregation_frequency)
        return self._train(self.boundaries.apply(self.plan("the uninterrupted run", settings)))

    def resume(self, run: Run, batches: int) -> Run:
        """Return a run that resumes from the checkpoint of ``run`` after ``batches`` batches."""
        key = (id(run), batches)
        if key not in self._resumed:
            plan = dataclasses.replace(
                run.plan,
                name="the resumed run",
                storage=self._make_storage(),
                resume_from=run.checkpoints[batches],
                recorded={"reads_state": True, "watches": True},
                trusted=True,  # this process wrote the checkpoint
            )
            self._resumed[key] = self._train(plan)
        return self._resumed[key]

    @property
    def processes(self) -> ProcessRuns:
        """Two processes with shared batches, and a single one; a failure is raised once, then as NotCompared."""
        outcome = self._process_outcome
        if isinstance(outcome, ProcessRuns):
            return outcome
        if self._failure_is_told:
            raise NotCompared("the trial fails with two processes, as another check says")
        self._failure_is_told = isinstance(outcome, CheckFailed)
        raise outcome

    @functools.cached_property
    def _process_outcome(self) -> ProcessRuns | CheckFailed | NotCompared:
        try:
            straight = self.require(self.straight)
            builds_once = self._builds_once is True
            return train_two_and_one(self.source, straight, self.plan, self.code, self._plan_elsewhere(), builds_once)
        except (CheckFailed, NotCompared) as e:
            return e

    def train_elsewhere(self, hash_seed: str) -> TrainingRecord:
        """Return the record of another process under a hash seed."""
        ((result,),) = train_in_processes(self.source, [([self._plan_elsewhere()], None)], hash_seed)
        return result.record

    def _plan_elsewhere(self) -> RunPlan:
        threads = int(self.straight.record.environment["threads"])
        return self.boundaries.apply(self.plan("another process", threads=threads, recorded={}))

    def train_first_elsewhere(self, hash_seed: str) -> TrainingRecord:
        """Return such a record, reusing the process that is compared with two if it has this hash seed."""
        if hash_seed == HASH_SEED and isinstance(outcome := self._process_outcome, ProcessRuns):
            return outcome.elsewhere.record
        return self.train_elsewhere(hash_seed)

    def halved(self, into: int) -> Run:
        """Validate, then train on one batch in ``into`` equal parts without updates between, and without chance."""
        if into not in self._halved:
            settings = dataclasses.replace(share_evenly(self.settings), batches=1)
            if isinstance(whole := settings.hparams.get("global_batch_size"), int) and into > 1:
                hparams = {**settings.hparams, "global_batch_size": whole // into}
                settings = dataclasses.replace(settings, hparams=hparams, batches=into, aggregation_frequency=into)
            self._halved[into] = self._validate_first(f"a run of a batch in {into}", settings)
        return self._halved[into]

    @functools.cached_property
    def half_validation(self) -> Run:
        """The run of one undivided batch, with validation batches of half the size."""
        settings = self.halved(1).plan.settings
        return self._validate_first("a run with half validation batches", settings, halves_validation_batch=True)

    def _validate_first(self, name: str, settings: RunSettings, **data: Any) -> Run:
        size = self.straight.observer.validation.batch_size
        samples = None if size is None else 4 * size
        options = make_options(ShortenedData(validation_samples=samples, loads_here=True, **data))
        return self._train(self.plan(name, settings, **options))

    @functools.cached_property
    def conversion(self) -> Conversion:
        """The trial beside its reference; raises NotCompared or BadTrial if there is no reference."""
        return compare_with_reference(self.options, self.source, self.reference_settings)

    def find_records(self) -> tuple[dict[str, TrainingRecord], Difference | None]:
        """Return the records of the ``"reference"``, if any, and of ``"ours"``, and the first difference."""
        with contextlib.suppress(BadTrial, CheckFailed, NotCompared):
            reference, ours, difference = self.conversion
            return {"reference": reference, "ours": ours}, difference
        with contextlib.suppress(BadTrial, CheckFailed, NotCompared):
            return {"ours": self.straight.record}, None
        return {}, None

    def require(self, run: Run) -> Run:
        """Return the run; raises NotCompared if the run failed, because another check reports the failure."""
        if run.failure is not None:
            raise NotCompared(f"the trial fails {run.failure.stage} ({run.failure.reason})")
        return run

    def require_success(self, run: Run) -> Run:
        """Return the run; raises BadTrial or CheckFailed with an explanation if the run failed."""
        if run.failure is None:
            return run
        if explanation := explain_failure(self.source, self.settings, run.failure):
            raise BadTrial(explanation)
        raise CheckFailed(f"{self.source.name} fails {run.failure.description}")
