"""Does a trial train the same in every process?"""

from __future__ import annotations

import dataclasses
import os

from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.checks.training import difference_of_runs
from det_lightning.testing.observation.source_scan import depends_on_hash, may_be_unseeded
from det_lightning.testing.processor_time import Stuck
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.records.record import TrainingRecord
from det_lightning.testing.training.requirements import find_lines
from det_lightning.testing.training.runs import TrialRuns
from det_lightning.testing.training.separate import Role, train_in_processes
from det_lightning.testing.training.trial_source import ImportedTrial


def in_another_process(runs: TrialRuns) -> None:
    """Another process, with another seed for the hashes of strings, trains the same to the bit."""
    if difference_of_runs(runs.require(runs.straight), runs.require(runs.again)) is not None:
        raise NotCompared("two runs in one process differ already")
    seeds = [seed for seed in ("1", "2", "3") if seed != os.environ.get("PYTHONHASHSEED")]
    first = _train(runs, seeds[0])
    if (difference := _difference(runs.straight.record, first, "in this process", "in another one")) is None:
        return
    again = _train(runs, seeds[0])
    if _difference(first, again, "in one process", "in another one") is not None:
        raise CheckFailed(
            f"Another process does not train the same. {difference}",
            "a value that differs between processes: the time, the number of the process, or an address in memory, as "
            "in id() and the hash() of an object",
            details=find_lines(runs.source, may_be_unseeded),
        )
    raise CheckFailed(
        f"Under another PYTHONHASHSEED the trial does not train the same. {difference}",
        "the order of a set of strings, or the hash() of one, which differ in each process: sort the set, or take "
        "zlib.crc32(text.encode()) for hash(text)",
        details=find_lines(runs.source, depends_on_hash),
    )


def _difference(one: TrainingRecord, other: TrainingRecord, *sides: str) -> Difference | None:
    found = first_difference(one.since("on_training_start"), other.since("on_training_start"))
    return None if found is None else dataclasses.replace(found, sides=(sides[0], sides[1]))


def _train(runs: TrialRuns, seed: str) -> TrainingRecord:
    if not isinstance(runs.source, ImportedTrial):
        raise NotCompared(f"{runs.source.name} is not given by the name of its module")
    threads = int(runs.straight.record.environment["threads"])
    plan = runs.boundaries.applied_to(runs.plan("another process", threads=threads))
    try:
        ((result,),) = train_in_processes(runs.source, [Role([plan])], runs.new_folder("hash"), seed)
    except Stuck as e:
        raise CheckFailed(f"In another process the trial does not end. {e}") from None
    return result.record
