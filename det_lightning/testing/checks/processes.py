"""Checks of two processes with shared batches: the same samples, weights, losses and metrics as in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import numpy as np

from det_lightning.testing.checks import CheckFailed, NotCompared, list_names
from det_lightning.testing.observation.source_scan import defines, makes_sum, reads_rank, scales_by_size, sizes_batch
from det_lightning.testing.records.record import TrainingRecord, distance, read_number
from det_lightning.testing.training.execution import Run, compare_runs
from det_lightning.testing.training.in_processes import SIZE, ProcessRuns
from det_lightning.testing.training.trainings import TrialRuns

# Another order of summation, or averaging the means of uneven parts, stays far below this; a sum for a mean does not.
_SHARE = 0.05
_NOISY_SHARE = 0.15
_SAME = 1e-3
_CAUSES = [
    "a loss that is a sum over the batch instead of a mean",
    "a learning rate or loss that depends on the number of processes, or on the batch size of one of them",
]


def share_samples(runs: TrialRuns) -> list[str]:
    """Together, the batches of two processes have the same samples as those of one."""
    results = _require_batches(runs)
    loader = results.one.observer.training
    _require_same_lengths(runs, results)
    first, second = (rank.observer.samples[0] for rank in results.ranks)
    if first is not None and first == second and first + first != results.one.observer.samples[0]:
        raise CheckFailed(
            f"Both processes train on the same samples in batch 0, {results.ranks[0].observer.lengths[0]} each.",
            "a loader that is not a det_lightning.pytorch.DataLoader, whose data the trial does not shard: take each "
            "context.distributed.size-th sample, beginning at context.distributed.rank",
            details=runs.code.find(sizes_batch),
        )
    lengths = [result.observer.training.samples for result in (results.one, results.ranks[0])]
    if loader.is_sharded and None not in lengths and lengths[0] != lengths[1]:
        if (lengths[1] or 0) > (lengths[0] or 0):
            raise NotCompared(f"the dataset has {lengths[1]} items in each of two processes, and {lengths[0]} in one")
        raise CheckFailed(
            f"The training data have {lengths[1]} samples in each of two processes, and {lengths[0]} in one: they are "
            "sharded twice.",
            "data that the trial shards by rank, and det_lightning.pytorch.DataLoader shards again: pass all data",
            details=runs.code.find(reads_rank),
        )
    draws = draws_while_training(results.one.record)
    if draws or None in results.one.observer.samples:
        reason = (
            "random numbers are drawn for each batch"
            if draws
            else "arrays of a batch have other lengths than the batch"
        )
        same = f"two processes train on as many samples as one, {results.one.observer.lengths[0]} in batch 0"
        raise NotCompared(f"{same}; as {reason}, the samples cannot be told apart")
    if (batch := _find_other_samples(results)) is None:
        return results.remarks
    message = f"two processes train on other samples than one, first in batch {batch}"
    if not loader.is_sharded or loader.has_own_batches:
        does = "makes its batches" if loader.has_own_batches else "shards its training data"
        raise NotCompared(f"the trial {does} itself; {message}")
    raise CheckFailed(
        f"{message.capitalize()}.",
        "an order of the data that each process draws for itself, from a generator that is seeded with its rank",
        details=runs.code.find(reads_rank),
    )


def _require_batches(runs: TrialRuns) -> ProcessRuns:
    results = runs.processes
    if not any(results.one.observer.lengths):
        raise NotCompared("the batches of this trial hold no tensors or arrays")
    return results


def _require_same_lengths(runs: TrialRuns, results: ProcessRuns) -> None:
    lengths = zip(results.one.observer.lengths, *(rank.observer.lengths for rank in results.ranks), strict=False)
    for batch, (one, *both) in enumerate(lengths):
        if sum(both) == one:
            continue
        message = f"wo processes train on {sum(both)} samples in batch {batch}, where one trains on {one}"
        if not results.sets_batch_size:
            raise NotCompared(f"there is no hyperparameter global_batch_size to share: t{message}")
        if results.one.observer.training.has_own_batches:
            raise NotCompared(f"a batch_sampler of the trial makes the batches: t{message}")
        raise CheckFailed(
            f"T{message}.",
            "a loader with batch_size=context.get_global_batch_size(), or a number: each process needs "
            "context.get_per_slot_batch_size()",
            details=runs.code.find(sizes_batch),
        )


def _find_other_samples(results: ProcessRuns) -> int | None:
    """Return the first batch whose known samples differ between two processes and one."""
    samples = [run.observer.samples for run in (results.one, *results.ranks)]
    batches = enumerate(zip(*samples, strict=False))
    others = (batch for batch, (one, *both) in batches if one is not None and sum(filter(None, both), Counter()) != one)
    return next(others, None)


def keep_equal_weights(runs: TrialRuns) -> None:
    """Both processes have equal parameters after each update."""
    results = runs.processes
    first, second = results.ranks
    lines = runs.code.find(reads_rank)
    for event, other in zip(first.record.select("batch_end"), second.record.select("batch_end"), strict=False):
        weights = (event["weights"], other["weights"])
        if names := [name for name in first.observer.trainable if weights[0].get(name) != weights[1].get(name)]:
            raise CheckFailed(
                f"Two processes have different weights after batch {event['batch']}: {list_names(names)}.",
                "gradients that are not exchanged: loss.backward() instead of context.backward(loss)",
                "weights that the trial changes itself, differently in each process",
                details=lines,
            )
    for when in ("start", "end"):
        if names := [name for name, _, _ in _find_different(results.ranks, when, trained=True)]:
            after = "before the first batch" if when == "start" else f"after {first.record.batches} batches"
            raise CheckFailed(
                f"Two processes have different parameters {after}, which no wrapped model has: {list_names(names)}.",
                "a parameter beside the wrapped models, whose gradient is not averaged over processes: make it part "
                "of a model that context.wrap_model() gets",
                "an initial value that depends on the rank",
                details=lines,
            )


def agree_with_one(runs: TrialRuns) -> None:
    """Two processes have the losses, gradients and weights of one, up to rounding; dropout and the like are off."""
    results = _require_batches(runs)
    # If even two runs of one process differ, two processes differ for the same reason.
    if (difference := compare_runs(runs.straight, runs.require(runs.again))) is not None:
        raise NotCompared(
            f"two runs of one process with seed {runs.options.seed} differ already, first in the {difference.kind} "
            f"{difference.name}; the check 'is deterministic under a seed' names the causes"
        )
    draws = draws_while_training(results.one.record)
    if (found := next(_find_scaled_losses(results, _NOISY_SHARE if draws else _SHARE), None)) is None:
        if draws:
            raise NotCompared(
                "train_batch(), or the loader between two batches, draws random numbers, and two processes draw others "
                "than one"
            )
        if (batch := _find_other_samples(results)) is not None:
            raise NotCompared(f"two processes train on other samples than one in batch {batch}")
        if (found := next(_find_differences(results), None)) is None:
            return
        if _depends_on_batch_size(runs, results):
            raise NotCompared(
                "the loss of a batch is not the mean of the losses of its halves, in one process either, such as a "
                "mean over tokens or a contrastive loss"
            )
    suspects = [
        f"{name} is {one} in one process and {other} in the other"
        for name, one, other in _find_different(results.ranks, "start", trained=False)
    ]
    of_rank = runs.code.find(reads_rank)
    causes = [*_CAUSES, *(["a value of the trial that depends on the rank"] if suspects or of_rank else [])]
    details = [*suspects[:8], *of_rank, *runs.code.find(makes_sum, scales_by_size)]
    raise CheckFailed(f"Two processes do not train like one: {found}", *causes, details=details)


def _pair_losses(one: Run, *ranks: Run) -> Iterator[tuple[str, int, float, float]]:
    """Yield each loss with the batch, the value in one process, and the mean over the ranks."""
    first, *others = (result.record.curves("batch_end") for result in (one, *ranks))
    for name in (name for name in first if "loss" in name.lower() and all(name in curves for curves in others)):
        for (batch, single), *values in zip(first[name], *(curves[name] for curves in others), strict=False):
            yield name, batch, single, fmean(value for _, value in values)


def _find_scaled_losses(results: ProcessRuns, share: float) -> Iterator[str]:
    """Yield first losses about twice or half as large as in one process, which random draws cannot explain."""
    for name, batch, one, two in _pair_losses(results.one, *results.ranks):
        times = two / one if one else 1.0
        if batch == 0 and any(abs(times / factor - 1) < share for factor in (SIZE, 1 / SIZE)):
            yield f"metric {name!r} of batch 0 is {times:.3g} times as large as in one."


def _find_differences(results: ProcessRuns) -> Iterator[str]:
    """Yield losses, gradients and a parameter far from the values of a single process, in this order."""
    one = results.one
    two = results.ranks[0]
    for name, batch, single, mean in sorted(_pair_losses(one, *results.ranks), key=lambda pair: pair[1]):
        if not abs(mean - single) <= _SHARE * max(abs(mean), abs(single)) + 1e-4:
            both = f"{mean:.6g} on average in two, and {single:.6g} in one, {abs(mean - single):.3g} apart"
            yield f"metric {name!r} of batch {batch} is {both}."
    norms = {name: _norm(gradient) for name, gradient in one.observer.gradients.items()}
    least = _SHARE * _norm([*norms.values()]) / 10
    for name, gradient in two.observer.gradients.items():
        if name in norms and _norm(gradient - one.observer.gradients[name]) > max(_SHARE * norms[name], least):
            times = _norm(gradient) / max(norms[name], 1e-12)
            yield f"in batch 0 the gradient of parameter {name!r} is {times:.3g} times that of one process."
    initial = one.observer.initial_parameters
    ends = [{name: run.observer.final["weights"][name].double() for name in initial} for run in (one, two)]
    apart = {name: _norm(ends[1][name] - ends[0][name]) for name in initial}
    moved = {name: _norm(ends[0][name] - before.double()) for name, before in initial.items()}
    if _norm([*apart.values()]) > _SHARE * max(_norm([*moved.values()]), 1e-12):
        name = max(apart, key=apart.__getitem__)
        yield (
            f"parameter {name!r} is {apart[name]:.3g} apart after {one.record.batches} batches, in which one process "
            f"moved it by {moved[name]:.3g}."
        )


def _norm(numbers: Any) -> float:
    return float(np.linalg.norm(np.ravel(numbers)))


def _depends_on_batch_size(runs: TrialRuns, results: ProcessRuns) -> bool:
    """Return whether the first loss equals that of one process on the halves, but not on the whole batch."""
    losses = {name: pair for name, batch, *pair in _pair_losses(results.one, *results.ranks) if batch == 0}
    halved = runs.halved(SIZE)
    if not results.sets_batch_size or all(_are_close(*pair) for pair in losses.values()) or halved.failure:
        return False
    halves = halved.record.curves("batch_end")
    return all(_are_close(fmean(value for _, value in halves[name]), two) for name, (_, two) in losses.items())


def _are_close(one: float, other: float) -> bool:
    return distance(one, other) <= _SAME * max(abs(one), abs(other)) + 1e-6


def validate_like_one(runs: TrialRuns) -> None:
    """A validation in two processes gives the metrics of one process with batches of the same size."""
    results = runs.processes
    ranks = results.ranks
    batch_size = ranks[0].observer.validation.batch_size
    if batch_size is None:
        raise NotCompared("the validation loader is not a det_lightning.pytorch.DataLoader with a batch_size")
    if any(result.observer.draws for result in (*ranks, results.one)):
        raise NotCompared("the validation draws random numbers, and two processes draw others than one")
    one = {result.observer.validation.batch_size: result for result in (results.halved, results.one)}.get(batch_size)
    if one is None:
        raise NotCompared(f"batches of {batch_size} validation samples were not tried in one")
    two_metrics, one_metrics = (result.record.select("validation")[0]["reported"] for result in (ranks[0], one))
    pairs = {name: (read_number(value), read_number(two_metrics.get(name))) for name, value in one_metrics.items()}
    numbers = {name: (single, two) for name, (single, two) in pairs.items() if single is not None and two is not None}
    if not numbers:
        raise NotCompared("no metric of the validation is a number")
    for name, (single, two) in numbers.items():
        if not _are_close(single, two):
            raise CheckFailed(
                f"Validation metric {name!r} is {two:.6g} with two processes and {single:.6g} with one, on the same "
                f"samples in batches of {batch_size}, before the first batch of training.",
                "a metric that is reduced over the processes in another way than over batches, such as in "
                "cross_slot_reduce() of a reducer",
                "a value of the trial that depends on the rank, or a model that differs between the processes",
                details=runs.code.find(reads_rank, defines("cross_slot_reduce")),
            )


def _find_different(ranks: list[Run], when: str, trained: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name and values of what differs between two processes: parameters, or else other state."""
    mine, theirs = (rank.observer.states.get(when, {}) for rank in ranks)
    for path in mine.keys() & theirs.keys():
        one = mine[path]
        other = theirs[path]
        if one.text != other.text and not one.holder.wrapped and one.trains is trained and "rank" not in path:
            yield path, one.text[:40], other.text[:40]


def draws_while_training(record: TrainingRecord) -> bool:
    """Return whether random numbers are drawn in ``train_batch()``, or by the loader between two batches."""
    starts = record.select("batch_start")
    ends = record.select("batch_end")
    pairs = list(zip(starts, ends, strict=True))
    followed = zip(pairs, starts[1:], strict=False)
    pairs += [(end, later) for (start, end), later in followed if start["epoch"] == later["epoch"]]
    return any(before["random"] != after["random"] for before, after in pairs)
