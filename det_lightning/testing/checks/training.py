"""Checks of training: it ends, is the same each time, aggregates, and goes through the context."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from det_lightning.porting.bypass_rules import DEVICE, PROCESSES
from det_lightning.testing.checks import CheckFailed, NotCompared, list_names
from det_lightning.testing.observation.call_watch import TOO_LATE
from det_lightning.testing.observation.observer import BatchModes, shorten_names
from det_lightning.testing.observation.source_scan import (
    assigns,
    calls,
    compares_index,
    depends_on_hash,
    is_text,
)
from det_lightning.testing.records.difference import find_cancelling_gradients, usual_causes
from det_lightning.testing.training.execution import compare_records, compare_runs
from det_lightning.testing.training.in_processes import HASH_SEED
from det_lightning.testing.training.trainings import TrialRuns


def trains(runs: TrialRuns) -> None:
    """The trial trains to the end, with finite losses."""
    run = runs.straight
    if not run.fails_in_validation:
        runs.require_success(run)
    for batch, metrics in enumerate(run.observer.metrics):
        for name, value in metrics.items():
            number = 0.0
            with contextlib.suppress(TypeError, ValueError):  # the metric is not a number
                number = float(np.asarray(value))
            if "loss" in name.lower() and not math.isfinite(number):
                raise CheckFailed(
                    f"training metric {name!r} is {number:g} at batch {batch}.",
                    "a learning rate that is too high for these hyperparameters",
                    "a logarithm or square root of 0, or a division by 0, in the loss",
                    details=runs.code.find(is_text(name)),
                )


def is_deterministic(runs: TrialRuns) -> list[str]:
    """Two runs with the same seed are equal to the bit, including a first run that writes files."""
    one = runs.require(runs.straight)
    if (difference := compare_runs(one, runs.require_success(runs.again))) is not None:
        raise CheckFailed(
            f"Two runs with seed {runs.options.seed} are not the same. {difference}",
            *usual_causes("seed", difference.kind),
            details=runs.code.find_chances(),
        )
    if not runs.written:
        return []
    if (difference := compare_runs(runs.probe, runs.require_success(runs.probe_again))) is not None:
        raise CheckFailed(
            f"The very first run, which wrote {list_names(runs.written)}, is not like the same run afterwards. "
            f"{difference}",
            "a file that the first run writes and later ones read: let the first run read what it has written, too",
        )
    return [f"the first run wrote {list_names(runs.written)}, which later runs may read"]


def is_deterministic_elsewhere(runs: TrialRuns) -> None:
    """Another process with another hash seed trains the same to the bit."""
    if compare_runs(runs.require(runs.straight), runs.require(runs.again)) is not None:
        raise NotCompared("two runs in one process differ already")
    seed = next(seed for seed in (HASH_SEED, "1") if seed != os.environ.get("PYTHONHASHSEED"))
    here = runs.straight.record.since("on_training_start")
    first = runs.train_first_elsewhere(seed)
    if (difference := compare_records(here, first, ("in this process", "in another one"))) is None:
        return
    again = runs.train_elsewhere(seed)
    if compare_records(first.since("on_training_start"), again) is not None:
        raise CheckFailed(
            f"Another process does not train the same. {difference}",
            "a value that differs between processes: the time, the number of the process, or an address in memory, as "
            "in id() and the hash() of an object",
            details=runs.code.find_chances(),
        )
    raise CheckFailed(
        f"Under another PYTHONHASHSEED the trial does not train the same. {difference}",
        "the order of a set of strings, or the hash() of a string, which differ in each process: sort the set, or take "
        "zlib.crc32(text.encode()) for hash(text)",
        details=runs.code.find(depends_on_hash),
    )


def moves_every_parameter(runs: TrialRuns) -> None:
    """Every trainable parameter gets a gradient, is in an optimizer, and moves."""
    run = runs.require(runs.straight)
    seen = run.observer
    if not seen.trainable:
        lines = runs.code.find(calls("requires_grad_"), assigns("requires_grad"))
        raise CheckFailed("No parameter of a wrapped model is trainable: all have requires_grad=False.", details=lines)
    trained = {name.partition(".")[0] for name in seen.trainable if seen.trainable[name] or name in seen.with_gradient}
    # A model that is only evaluated, such as a teacher, gets no gradient and is in no optimizer.
    expected = [name for name in seen.trainable if not trained or name.partition(".")[0] in trained]
    without = [name for name in expected if name not in seen.with_gradient]
    stray = [name for name in expected if name in seen.with_gradient and not seen.trainable[name]]
    (end,) = run.record.select("end")
    # A gradient that is only rounding may move a parameter or not.
    exempt = {*without, *stray, *find_cancelling_gradients(seen.stepped)}
    others = [name for name in expected if name not in exempt]
    moved = _find_moved(others, seen.weights_before[0], end["weights"])
    still = [name for name in others if name not in moved]
    findings = [
        (without, "never get a gradient", "a layer that the loss does not use, or whose output is detached: remove it, "
         "or freeze it with requires_grad_(False)"),
        (stray, "get a gradient, but are in no wrapped optimizer", "an optimizer that is built from other "
         "parameters: pass it the parameters() of the model that context.wrap_model() returned"),
        (still, "are in an optimizer and get a gradient, but do not move", "a gradient or learning rate of 0 "
         f"throughout the {runs.options.batches} batches (set --trial-batches for more), step_optimizer() that is not "
         "called for that optimizer, or gradients that are cleared before the step"),
    ]  # fmt: skip
    if found := [finding for finding in findings if finding[0]]:
        if found == findings[:1]:
            _allow_later_gradients(runs, without)
        raise CheckFailed(
            f"In {run.record.batches} batches, {len(found[0][0])} of {len(seen.trainable)} trainable parameters "
            f"{found[0][1]}.",
            *(cause for _, _, cause in found),
            details=[f"{finding}: {list_names(names)}{_find_making(runs, names[0])}" for names, finding, _ in found],
        )


def _find_making(runs: TrialRuns, parameter: str) -> str:
    """Return, in brackets, the line that assigns a parameter, found by the last part of its name."""
    for part in reversed(parameter.split(".")[:-1]):
        if lines := runs.code.find(assigns(part)):
            return f" ({lines[0].partition(': ')[0]})"
    return ""


def _allow_later_gradients(runs: TrialRuns, names: list[str]) -> None:
    """Raise NotCompared if which parameters get a gradient depends on the index of the batch or epoch."""
    if not (lines := runs.code.find(compares_index)):
        return
    asks_context = any("current_train" in line for line in lines)
    if asks_context or not runs.later.observer.with_gradient.isdisjoint(names):
        raise NotCompared(
            f"{list_names(names)} got no gradient in {runs.options.batches} batches, and may get one later: the trial "
            f"decides by the index of batch or epoch ({lines[0]}); set --trial-batches for more"
        )


def _find_moved(names: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in names if repr(after[name]) != repr(before[name])]


def trains_under_aggregation(runs: TrialRuns) -> list[str]:
    """Weights move only on batches that complete an update, by the gradients of all its batches."""
    frequency = runs.aggregation_frequency
    runs.require(runs.straight)
    run = runs.aggregation
    is_refused = run.failure is not None and "auto_zero_grads=False" in run.failure.reason
    if is_refused and runs.settings.aggregation_frequency == 1:
        raise NotCompared("the trial clears gradients itself, with auto_zero_grads=False, which excludes aggregation")
    runs.require_success(run)
    under = f"With aggregation_frequency={frequency}"
    clears = run.observer.calls["clear"].items()
    if cleared := [call for call, batches in clears if any(batch % frequency for batch in batches)]:
        raise CheckFailed(
            f"{under} the trial clears gradients that an update still needs:",
            "zero_grad() left over from a plain PyTorch loop: context.step_optimizer() clears the gradients itself",
            details=cleared,
        )
    if run.record.batches < frequency:
        raise NotCompared(f"{run.record.batches} batches do not complete an update of {frequency}; see --trial-batches")
    trainable = run.observer.trainable
    changes = zip(run.observer.weights_before, run.record.select("batch_end"), strict=True)
    moved = {event["batch"]: _find_moved(trainable, before, event["weights"]) for before, event in changes}
    for batch, names in moved.items():
        # The trial may also change weights itself, such as to clamp them or to average them.
        if names and batch in run.observer.steps and (batch + 1) % frequency:
            line = run.observer.steps[batch]
            raise CheckFailed(
                f"{under} batch {batch} completes no update, but moves {list_names(names)}.",
                "optimizer.step() in place of context.step_optimizer(optimizer)",
                details=[] if line is None else [f"{line}: a step in batch {batch}"],
            )
    if not any(moved.values()):
        raise CheckFailed(
            f"{under} no parameter moves in {run.record.batches} batches.",
            "context.step_optimizer() that is called only on some batches, by their index",
            details=runs.code.find(calls("step_optimizer")),
        )
    clips = [*runs.straight.observer.calls["clip"]]
    if clips and runs.settings.aggregation_frequency > 1:
        raise CheckFailed(f"{under} the trial clips gradients before they are averaged:", details=clips)
    return clips


def matches_reference(runs: TrialRuns) -> None:
    """The trial trains as on Determined, batch by batch; in one environment that includes weights and callbacks."""
    reference, ours, difference = runs.conversion
    if difference is None:
        return
    finding = "det_lightning does not train like the reference."
    causes = [difference.likely_cause]
    theirs, mine = (record.curves("batch_end") for record in (reference, ours))
    is_metric = difference.kind == "metric" and difference.part  # of a mean, for which each batch may be the same
    if is_metric and theirs.get(difference.name) == mine.get(difference.name):
        finding = f"det_lightning reports {difference.name!r} as it was returned, the reference as it became later."
        causes.insert(
            0,
            f"train_batch() returns in {difference.name!r} a tensor that training changes later, such as the data of a "
            "weight. Determined reports the value at the end of the workload, det_lightning the returned value: return "
            "a copy (value.clone()) to get the returned value from both",
        )
    raise CheckFailed(f"{finding} {difference}", *causes)


def trains_through_its_context(runs: TrialRuns) -> list[str]:
    """Backward passes and steps go through the context, each scheduler is stepped once, and models train."""
    run = runs.straight
    seen = run.observer
    twice = [
        f"{line}: context.wrap_{kind}() is called twice with the same {of}"
        for kind, of in seen.twice.items()
        for line in [line.partition(": ")[0] for line in runs.code.find(calls(f"wrap_{kind}"))[-1:]] or ["the trial"]
    ]
    cause = "lines left over from a plain PyTorch loop: they break aggregation, precision and several processes"
    _reject("The trial bypasses its context:", [*seen.calls["action"], *twice], cause)
    late = {f"{line} {TOO_LATE}": None for line in runs.code.find_late_changes()}
    _reject("The trial steps with other gradients than those of its batch:", {**seen.calls["gradient"], **late})
    _reject(
        "The trial sets the same seed again while it trains, so that the code after it draws the same numbers:",
        seen.calls["seed"],
        "a seed that is set for a batch, a sample or in a hook: leave it to the experiment, or set it within "
        "torch.random.fork_rng()",
    )
    _reject(
        "The trial trains in evaluation mode, without dropout and with the running statistics of batch norms:",
        list(_find_left_on(seen.modes)),
        "eval() without train() afterwards: the training loop switches models to training mode only after reports and "
        "validations",
    )
    runs.require(run)
    counts = runs.code.find_counts_in_epoch()
    return [f"{line}: batch_idx counts all batches of the training, not those of the epoch" for line in counts]


def _find_left_on(batches: list[BatchModes]) -> Iterator[str]:
    """Yield a finding for each line that leaves evaluation mode on, with modules that trained before."""
    found: dict[str, tuple[int, list[str]]] = {}
    trained: set[str] = set()
    left_on = [(modes, name) for modes in batches for name in modes.entered if modes.start.get(name) is not None]
    # Others switch to training mode again themselves, at the start of a batch.
    recovers = {name for modes, name in left_on if modes.entered[name] or name in modes.chosen}
    for batch, (before, modes) in enumerate(itertools.pairwise(batches), start=1):
        trained |= {name for name, is_training in before.entered.items() if is_training}
        for name in (name for name in modes.entered if name in trained and name not in recovers):
            # Only by chance does the training loop reset a mode right after the batch that left the mode on.
            is_reset = before.entered.get(name) and modes.start[name] is None
            if (line := before.end.get(name) if is_reset else modes.start[name]) is not None:
                _, names = found.setdefault(line or "the trial", (batch, []))
                names.extend({name} - {*names})
    for line, (batch, names) in found.items():
        yield f"{line}: evaluation mode is left on, in which {shorten_names(names)} trains from batch {batch} on"


def _reject(message: str, details: Collection[str], *causes: str) -> None:
    if details:
        raise CheckFailed(message, *causes, details=details)


def uses_no_hard_coded_device(runs: TrialRuns) -> list[str]:
    """No line of the trial hard-codes a device, and no call uses another device than the context's."""
    cause = (
        "a line left over from a script for one GPU: context.wrap_model() moves models to the device, batches are "
        "there already, and context.to_device(x) moves what the trial makes itself; context.device is the device"
    )
    _reject_bypasses(runs, DEVICE, runs.straight.observer.calls["device"], "The trial chooses devices itself:", cause)
    return [f"{line}: never moved to the device, as by context.to_device(...)" for line in runs.code.find_unmoved()]


def has_no_process_groups(runs: TrialRuns) -> None:
    """No line of the trial connects processes or distributes models and data."""
    cause = (
        "code left over from plain DistributedDataParallel: context.wrap_model() wraps models, pytorch.DataLoader "
        "gives each process its part, and context.distributed has rank, size, allgather and broadcast"
    )
    _reject_bypasses(
        runs, PROCESSES, runs.straight.observer.calls["process group"], "The trial handles processes itself:", cause
    )


def _reject_bypasses(runs: TrialRuns, kind: str, seen: Iterable[str], message: str, cause: str) -> None:
    """Raise if the trial's files have such code, or the probe run saw such calls elsewhere."""
    found = runs.code.find_bypasses(kind)
    lines = {finding.partition(": ")[0] for finding in found}
    elsewhere = [call for call in seen if call.partition(": ")[0] not in lines]
    _reject(message, dict.fromkeys([*found, *elsewhere]), cause)
    if not runs.straight.training_began:
        runs.require(runs.straight)
