"""Does the trial train, the same each time, under either API and on Determined, with aggregation, by its context?"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from det_lightning.bypass_rules import DEVICE, PROCESSES
from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.observation.source_scan import (
    bypasses_in,
    compares_index,
    may_be_unseeded,
    name_assigned,
)
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import Difference, usual_causes, whose_gradient_cancels
from det_lightning.testing.training.execution import Run
from det_lightning.testing.training.requirements import files_of, find_lines
from det_lightning.testing.training.runs import TrialRuns

_LISTED = 8


def listed(names: Collection[str]) -> str:
    """Return names separated by commas; if there are many, the first ones and the total number."""
    first = ", ".join(itertools.islice(names, _LISTED))
    return first if len(names) <= _LISTED else f"{first}, ... ({len(names)} in all)"


def difference_of_runs(one: Run, other: Run, after: int | None = None) -> Difference | None:
    """Return the first difference between two runs; ``other`` may resume from ``one`` after ``after`` batches."""
    start = "on_training_start" if after is None else "on_checkpoint_upload_end"
    difference = first_difference(one.record.since(start, after), other.record.since("on_training_start"))
    sides = (f"in {one.plan.name}", f"in {other.plan.name}")
    return None if difference is None else dataclasses.replace(difference, sides=sides)


def trains(runs: TrialRuns) -> None:
    """The trial trains to the end, with finite losses."""
    run = runs.straight
    if not run.fails_in_validation:
        runs.succeeded(run)
    for batch, metrics in enumerate(run.observer.metrics):
        for name, value in metrics.items():
            number = 0.0
            with contextlib.suppress(TypeError, ValueError):  # it is not a number
                number = float(np.asarray(value))
            if "loss" in name.lower() and not math.isfinite(number):
                raise CheckFailed(
                    f"training metric {name!r} is {number:g} at batch {batch}.",
                    "a learning rate that is too high for these hyperparameters",
                    "a logarithm or square root of 0, or a division by 0, in the loss",
                )


def is_deterministic(runs: TrialRuns) -> None:
    """Two runs with the same seed are equal to the bit."""
    one = runs.require(runs.straight)
    if (difference := difference_of_runs(one, runs.succeeded(runs.again))) is not None:
        raise CheckFailed(
            f"Two runs with seed {runs.options.seed} are not the same. {difference}",
            *usual_causes("seed", difference.kind),
            details=find_lines(runs.source, may_be_unseeded),
        )


def moves_every_parameter(runs: TrialRuns) -> None:
    """Every trainable parameter gets a gradient, is in an optimizer, and moves."""
    run = runs.require(runs.straight)
    seen = run.observer
    if not seen.trainable:
        raise CheckFailed("No parameter of the wrapped models is trainable: requires_grad is False for all of them.")
    trained = {name.partition(".")[0] for name in seen.trainable if seen.trainable[name] or name in seen.with_gradient}
    # A model that is only evaluated, such as a teacher, gets no gradient and is in no optimizer.
    expected = [name for name in seen.trainable if not trained or name.partition(".")[0] in trained]
    without = [name for name in expected if name not in seen.with_gradient]
    stray = [name for name in expected if name in seen.with_gradient and not seen.trainable[name]]
    (end,) = run.record.named("end")
    # A gradient that is only rounding may move a parameter or not.
    exempt = {*without, *stray, *whose_gradient_cancels(run.record)}
    others = [name for name in expected if name not in exempt]
    moved = _moved(others, seen.weights_before[0], end["weights"])
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
            _require_that_they_get_none_later(runs, without)
        raise CheckFailed(
            f"In {run.record.batches} batches, {len(found[0][0])} of {len(seen.trainable)} trainable parameters "
            f"{found[0][1]}.",
            *(cause for _, _, cause in found),
            details=[f"{finding}: {listed(names)}{_line_making(runs, names[0])}" for names, finding, _ in found],
        )


def _line_making(runs: TrialRuns, parameter: str) -> str:
    """Return where the trial makes the innermost part of a parameter's name that it assigns, in brackets."""
    for part in reversed(parameter.split(".")[:-1]):
        if lines := find_lines(runs.source, name_assigned(part)):
            return f" ({lines[0].partition(': ')[0]})"
    return ""


def _require_that_they_get_none_later(runs: TrialRuns, names: list[str]) -> None:
    """Raise NotCompared if the trial decides by the index of a batch or epoch what gets a gradient."""
    if not (lines := find_lines(runs.source, compares_index)):
        return
    asks_context = any("current_train" in line for line in lines)
    if asks_context or not runs.later.observer.with_gradient.isdisjoint(names):
        raise NotCompared(
            f"{listed(names)} got no gradient in {runs.options.batches} batches, and may get one later: the trial "
            f"decides by the index of batch or epoch ({lines[0]}); set --trial-batches for more"
        )


def _moved(names: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in names if repr(after[name]) != repr(before[name])]


def trains_under_aggregation(runs: TrialRuns) -> list[str]:
    """Weights move only on batches that complete an update, which uses the gradients of all of its batches."""
    frequency = runs.aggregation_frequency
    runs.require(runs.straight)
    run, watch = runs.aggregated
    if (
        run.failure is not None
        and "auto_zero_grads=False" in run.failure.reason
        and runs.settings.aggregation_frequency == 1
    ):
        raise NotCompared("the trial clears gradients itself, with auto_zero_grads=False, which excludes aggregation")
    runs.succeeded(run)
    if watch.cleared:
        raise CheckFailed(
            f"With aggregation_frequency={frequency} the trial clears gradients that an update still needs:",
            "zero_grad() left over from a plain PyTorch loop: context.step_optimizer() clears the gradients itself",
            details=watch.cleared,
        )
    if run.record.batches < frequency:
        raise NotCompared(f"{run.record.batches} batches do not complete an update of {frequency}; see --trial-batches")
    trainable = run.observer.trainable
    changes = zip(run.observer.weights_before, run.record.named("batch_end"), strict=True)
    moved = {event["batch"]: _moved(trainable, before, event["weights"]) for before, event in changes}
    for batch, names in moved.items():
        # The trial may also change weights itself, such as to clamp them or to average them.
        if names and batch in watch.stepped and (batch + 1) % frequency:
            raise CheckFailed(
                f"With aggregation_frequency={frequency} batch {batch} completes no update, but moves {listed(names)}.",
                "optimizer.step() in place of context.step_optimizer(optimizer)",
            )
    if not any(moved.values()):
        raise CheckFailed(
            f"With aggregation_frequency={frequency} no parameter moves in {run.record.batches} batches.",
            "context.step_optimizer() that is called only on some batches, by their index",
        )
    return _clips_of_one_batch(runs)


def _clips_of_one_batch(runs: TrialRuns) -> list[str]:
    """Return remarks on gradients that are clipped before they are averaged; raise if the trial aggregates."""
    clips = runs.probe[1].clips
    if clips and runs.settings.aggregation_frequency > 1:
        raise CheckFailed(
            f"With aggregation_frequency={runs.settings.aggregation_frequency} the trial clips gradients before they "
            "are averaged:",
            details=clips,
        )
    return list(clips)


def trains_equally(runs: TrialRuns) -> None:
    """``Trainer(trial, context).fit()`` and ``pl.Trainer().fit(TrialModule(...))`` give the same numbers."""
    straight = runs.require(runs.straight)
    lightning = runs.under_lightning
    if lightning.failure is not None:
        raise CheckFailed(
            f"Under pl.Trainer the trial fails {lightning.failure.description}",
            "code that needs something of the context which only a script with init() passes",
        )
    if (difference := difference_of_runs(straight, lightning)) is not None:
        raise CheckFailed(
            f"The two APIs do not train equally. {difference}",
            "random draws when the module is imported, before the seed is set",
            "state in globals or on the class, left behind by the first run",
        )


def matches_reference(runs: TrialRuns) -> None:
    """The trial trains as on Determined, batch by batch, including weights and callbacks."""
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
            "weight. Determined reports its value at the end of the workload, det_lightning the one that was returned: "
            "return a copy (value.clone()) to get the latter from both",
        )
    if reference.environment.get("hash_seed") is None:
        causes.append(
            "the order of a set of strings, which is another one in each process: this record does not say its "
            "PYTHONHASHSEED; record again"
        )
    raise CheckFailed(f"{finding} {difference}", *causes)


# Does the trial leave to its context everything that only the context may do?


def trains_through_its_context(runs: TrialRuns) -> None:
    """Backward passes and steps go through the context, and each scheduler is stepped once."""
    run, bypass = runs.probe
    if bypass.actions:
        raise CheckFailed(
            "The trial bypasses its context:",
            "lines left over from a plain PyTorch loop: they break aggregation, precision and several processes",
            details=bypass.actions,
        )
    if bypass.gradients:
        raise CheckFailed("The trial steps with other gradients than those of its batch:", details=bypass.gradients)
    if bypass.seeds:
        raise CheckFailed(
            "The trial sets the same seed in several batches, which then draw the same random numbers, as does all "
            "that follows:",
            "a seed that is set in a batch: leave it to the experiment, or set it within torch.random.fork_rng()",
            details=bypass.seeds,
        )
    runs.require(run)


def uses_no_hard_coded_device(runs: TrialRuns) -> None:
    """No line of the trial hard-codes a device, and none was seen using a device other than the context's."""
    _, bypass = runs.probe
    cause = (
        "a line left over from a script for one GPU: context.wrap_model() moves models to the device, batches are "
        "there already, and context.to_device(x) moves what the trial makes itself; context.device is the device"
    )
    _require_none(runs, DEVICE, bypass.devices, "The trial chooses devices itself:", cause)


def has_no_process_groups(runs: TrialRuns) -> None:
    """No line of the trial connects processes or distributes models and data."""
    _, bypass = runs.probe
    cause = (
        "code left over from plain DistributedDataParallel: context.wrap_model() wraps models, pytorch.DataLoader "
        "gives each process its part, and context.distributed has rank, size, allgather and broadcast"
    )
    _require_none(runs, PROCESSES, bypass.process_groups, "The trial handles processes itself:", cause)


def _require_none(runs: TrialRuns, kind: str, seen: Iterable[str], message: str, cause: str) -> None:
    """Raise if the trial's files have code of that kind, or the probe saw something on other lines."""
    with runs.source.imported():
        found = bypasses_in(files_of(runs.source), runs.source.directory, kind)
    lines = {finding.partition(": ")[0] for finding in found}
    elsewhere = [call for call in seen if call.partition(": ")[0] not in lines]
    if details := dict.fromkeys([*found, *elsewhere]):
        raise CheckFailed(message, cause, details=details)
    run, _ = runs.probe
    if not run.training_began:
        runs.require(run)
