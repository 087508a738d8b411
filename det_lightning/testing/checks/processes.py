"""Do two processes that share each batch train and validate like one?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import numpy as np

from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.checks.training import difference_of_runs, listed
from det_lightning.testing.observation.source_scan import reads_rank, sizes_batch
from det_lightning.testing.records.record import TrainingRecord, distance, number_in
from det_lightning.testing.training.process_runs import ProcessRuns
from det_lightning.testing.training.requirements import find_lines
from det_lightning.testing.training.runs import TrialRuns
from det_lightning.testing.training.separate import ProcessResult

# Another order of summation, or averaging the means of uneven parts, stays far below this; a sum for a mean does not.
_SHARE = 0.05
_NOISY_SHARE = 0.15
_SAME = 1e-3
_SIZE = 2


def share_samples(runs: TrialRuns) -> list[str]:
    """The batches of two processes are together those of one."""
    results = _compared(runs)
    _require_same_lengths(runs, results)
    first, second = (rank.samples[0] for rank in results.ranks)
    if first is not None and first == second and first + first != results.one.samples[0]:
        raise CheckFailed(
            f"Both processes train on the same samples in batch 0, {results.ranks[0].lengths[0]} each.",
            "a loader that is not a det_lightning.pytorch.DataLoader, whose data the trial does not shard: take each "
            "context.distributed.size-th sample, beginning at context.distributed.rank",
        )
    lengths = [result.dataset_length for result in (results.one, results.ranks[0])]
    if results.shards_here and None not in lengths and lengths[0] != lengths[1]:
        _reject_other_data(runs, *lengths)
    draws = draws_while_training(results.one.record)
    if draws or None in results.one.samples:
        reason = "random numbers are drawn for each batch" if draws else "arrays of a batch have other lengths than it"
        same = f"two processes train on as many samples as one, {results.one.lengths[0]} in batch 0"
        raise NotCompared(f"{same}; as {reason}, the samples cannot be told apart")
    if (batch := _find_other_samples(results)) is None:
        return results.remarks
    message = f"two processes train on other samples than one, first in batch {batch}"
    if not results.shards_here or results.has_own_batches:
        does = "makes its batches" if results.has_own_batches else "shards its training data"
        raise NotCompared(f"the trial {does} itself; {message}")
    raise CheckFailed(
        f"{message.capitalize()}.",
        "an order of the data that each process draws for itself, from a generator that is seeded with its rank",
        details=find_lines(runs.source, reads_rank),
    )


def _require_same_lengths(runs: TrialRuns, results: ProcessRuns) -> None:
    lengths = zip(results.one.lengths, *(rank.lengths for rank in results.ranks), strict=False)
    for batch, (one, *both) in enumerate(lengths):
        if sum(both) != one:
            message = f"wo processes train on {sum(both)} samples in batch {batch}, where one trains on {one}"
            if not results.sets_batch_size:
                raise NotCompared(f"there is no hyperparameter global_batch_size to share: t{message}")
            if results.has_own_batches:
                raise NotCompared(f"a batch_sampler of the trial makes the batches: t{message}")
            raise CheckFailed(
                f"T{message}.",
                "a loader with batch_size=context.get_global_batch_size(), or a number: each process needs "
                "context.get_per_slot_batch_size()",
                details=find_lines(runs.source, sizes_batch),
            )


def _reject_other_data(runs: TrialRuns, one: int | None, two: int | None) -> None:
    if (two or 0) > (one or 0):
        raise NotCompared(f"the dataset has {two} items in each of two processes, and {one} in one")
    raise CheckFailed(
        f"The training data have {two} samples in each of two processes, and {one} in one: they are sharded twice.",
        "data that the trial shards by rank, and det_lightning.pytorch.DataLoader shards again: pass it all of them",
        details=find_lines(runs.source, reads_rank),
    )


def _find_other_samples(results: ProcessRuns) -> int | None:
    """Return the first batch in which two processes do not train on the samples of one, as far as is known."""
    batches = enumerate(zip(results.one.samples, *(rank.samples for rank in results.ranks), strict=False))
    others = (batch for batch, (one, *both) in batches if one is not None and sum(filter(None, both), Counter()) != one)
    return next(others, None)


def keep_equal_weights(runs: TrialRuns) -> None:
    """Both processes have equal parameters after each update."""
    first, second = runs.processes.ranks
    for event, other in zip(first.record.named("batch_end"), second.record.named("batch_end"), strict=False):
        if names := [name for name in first.initial if event["weights"].get(name) != other["weights"].get(name)]:
            raise CheckFailed(
                f"Two processes have different weights after batch {event['batch']}: {listed(names)}.",
                "gradients that are not exchanged: loss.backward() instead of context.backward(loss)",
                "a forward pass through the original model instead of the one that context.wrap_model() returned",
                "weights that the trial changes itself, differently in each process",
                details=find_lines(runs.source, reads_rank),
            )
    for when in ("start", "end"):
        names = [name for name, _, _ in _different(first, second, when, trained=True)]
        if names:
            after = "before the first batch" if when == "start" else f"after {first.record.batches} batches"
            raise CheckFailed(
                f"Two processes have different parameters {after}, which no wrapped model has: {listed(names)}.",
                "a parameter beside the wrapped models, whose gradient is not averaged over processes: make it part "
                "of a model that context.wrap_model() gets",
                "an initial value that depends on the rank",
                details=find_lines(runs.source, reads_rank),
            )


def agree_with_one(runs: TrialRuns) -> None:
    """Two processes have, up to rounding, the losses, gradients and weights of one; dropout and batch norms are off."""
    results = _compared(runs)
    # If even two runs of one process differ, two processes differ for the same reason.
    if (difference := difference_of_runs(runs.straight, runs.require(runs.again))) is not None:
        raise NotCompared(
            f"two runs of one process with seed {runs.options.seed} differ already, first in the {difference.kind} "
            f"{difference.name}; the check that it is deterministic under a seed names the causes"
        )

    def fail(message: str) -> None:
        if not draws and _depends_on_batch_size(runs, results):
            raise NotCompared(
                "the loss of a batch is not the mean of the losses of its halves, in one process either, such as a "
                "mean over tokens or a contrastive loss"
            )
        fail_for_scale(message)

    def fail_for_scale(message: str) -> None:
        raise CheckFailed(f"Two processes do not train like one: {message}", *causes, details=suspects[:8])

    suspects = [
        f"{name} is {one} in one process and {other} in the other"
        for name, one, other in _different(results.ranks[0], results.ranks[1], "start", trained=False)
    ]
    causes = [*_CAUSES, *(["a value of the trial that depends on the rank"] if suspects else [])]
    draws = draws_while_training(results.one.record)
    _compare_scale(results, _NOISY_SHARE if draws else _SHARE, fail_for_scale)
    if draws:
        raise NotCompared(
            "train_batch(), or the loader between two batches, draws random numbers, and two processes draw others "
            "than one"
        )
    if (batch := _find_other_samples(results)) is not None:
        raise NotCompared(f"two processes train on other samples than one in batch {batch}")
    _compare_losses([rank.record for rank in results.ranks], results.one.record, fail)
    _compare_gradients(results, fail)
    _compare_parameters(results.ranks[0], results.one, fail)


_CAUSES = [
    "a loss that is a sum over the batch instead of a mean",
    "a learning rate or loss that depends on the number of processes, or on the batch size of one of them",
]


def validate_like_one(runs: TrialRuns) -> None:
    """A validation of two processes gives the metrics of one process with batches of the same size."""
    results = runs.processes
    ranks = results.ranks
    if ranks[0].validation_batch_size is None:
        raise NotCompared("the validation loader is not a det_lightning.pytorch.DataLoader with a batch_size")
    if any(result.validation_draws for result in (*ranks, results.one)):
        raise NotCompared("the validation draws random numbers, and two processes draw others than one")
    by_size = {one.validation_batch_size: one for one in (results.halved, results.one)}
    one = by_size.get(ranks[0].validation_batch_size)
    if one is None:
        raise NotCompared(f"batches of {ranks[0].validation_batch_size} validation samples were not tried in one")
    two_metrics, one_metrics = (result.record.named("validation")[0]["reported"] for result in (ranks[0], one))
    pairs = {name: (number_in(value), number_in(two_metrics.get(name))) for name, value in one_metrics.items()}
    if not any(single is not None and two is not None for single, two in pairs.values()):
        raise NotCompared("no metric of the validation is a number")
    for name, (single, two) in pairs.items():
        if single is not None and two is not None and not _are_close(single, two):
            raise CheckFailed(
                f"Validation metric {name!r} is {two:.6g} with two processes and {single:.6g} with one, on the same "
                f"samples in batches of {one.validation_batch_size}, before the first batch of training.",
                "a metric that is reduced over the processes in another way than over batches, such as in "
                "cross_slot_reduce() of a reducer",
                "a value of the trial that depends on the rank, or a model that differs between the processes",
                details=find_lines(runs.source, reads_rank),
            )


def _are_close(one: float, other: float) -> bool:
    return distance(one, other) <= _SAME * max(abs(one), abs(other)) + 1e-6


def two_train(runs: TrialRuns) -> None:
    """Two processes that share each batch train to the end.

    For trials of other libraries, whose weights and random numbers cannot be seen here and so are not compared.
    """
    ranks = runs.train_two()
    batches = ranks[0].record.settings.batches
    if any(rank.record.batches != batches or not rank.record.named("callback") for rank in ranks):
        trained = " and ".join(str(rank.record.batches) for rank in ranks)
        raise CheckFailed(f"Two processes trained {trained} batches, and should train {batches}.")


def _compared(runs: TrialRuns) -> ProcessRuns:
    results = runs.processes
    if not results.one.lengths or not any(results.one.lengths):
        raise NotCompared("the batches of this trial hold no tensors or arrays")
    return results


def _different(one: ProcessResult, other: ProcessResult, when: str, trained: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name and values of what differs between two processes: parameters, or else what may influence them."""
    states = [result.states.get(when, {}) for result in (one, other)]
    for path in states[0].keys() & states[1].keys():
        mine, theirs = (state[path] for state in states)
        if mine.text != theirs.text and not mine.is_wrapped and mine.trains is trained and "rank" not in path:
            yield path, _shorten(mine.text), _shorten(theirs.text)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def draws_while_training(record: TrainingRecord) -> bool:
    """Return whether random numbers are drawn in ``train_batch()``, or between the batches of an epoch to load data."""
    starts = record.named("batch_start")
    ends = record.named("batch_end")
    pairs = list(zip(starts, ends, strict=True))
    followed = zip(pairs, starts[1:], strict=False)
    pairs += [(end, later) for (start, end), later in followed if start["epoch"] == later["epoch"]]
    return any(before["random"] != after["random"] for before, after in pairs)


def _compare_losses(ranks: Sequence[TrainingRecord], one: TrainingRecord, fail: Callable[[str], None]) -> None:
    for event, *events in zip(*(record.named("batch_end") for record in (one, *ranks)), strict=False):
        for name, described in event["metrics"].items():
            single = number_in(described)
            if single is None or "loss" not in name.lower():
                continue
            values = [number_in(by_rank["metrics"].get(name)) for by_rank in events]
            two = fmean(np.nan if value is None else value for value in values)
            if not abs(two - single) <= _SHARE * max(abs(two), abs(single)) + 1e-4:
                fail(
                    f"metric {name!r} of batch {event['batch']} is {two:.6g} on average in two, and {single:.6g} in "
                    f"one, {abs(two - single):.3g} apart."
                )


def _compare_scale(results: ProcessRuns, share: float, fail: Callable[[str], None]) -> None:
    """Fail if the first loss is about twice or half as large, whatever random numbers are drawn."""
    for name, (first, *others) in _first_losses(results.one, *results.ranks):
        times = fmean(others) / first if first else 1.0
        if any(abs(times / factor - 1) < share for factor in (_SIZE, 1 / _SIZE)):
            fail(f"metric {name!r} of batch 0 is {times:.3g} times as large as in one.")


def _first_losses(*results: ProcessResult) -> Iterator[tuple[str, list[float]]]:
    """Yield the names of losses, and the values of each result for its first batch."""
    first, *others = (result.record.curves("batch_end") for result in results)
    for name in (name for name in first if "loss" in name.lower() and all(name in curves for curves in others)):
        yield name, [curves[name][0][1] for curves in (first, *others)]


def _depends_on_batch_size(runs: TrialRuns, results: ProcessRuns) -> bool:
    """Return whether the first loss of two processes is that of one for the same halves, but not for the batch."""
    losses = {name: (one, fmean(two)) for name, (one, *two) in _first_losses(results.one, *results.ranks)}
    if not results.sets_batch_size or all(_are_close(*pair) for pair in losses.values()) or runs.halves.failure:
        return False
    halves = runs.halves.record.curves("batch_end")
    return all(_are_close(fmean(value for _, value in halves[name]), two) for name, (_, two) in losses.items())


def _compare_gradients(results: ProcessRuns, fail: Callable[[str], None]) -> None:
    one = results.one.gradients
    two = results.ranks[0].gradients
    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in one.items()}
    total = float(np.linalg.norm(list(norms.values())))
    for name in one.keys() & two.keys():
        apart = float(np.linalg.norm(two[name] - one[name]))
        if apart > _SHARE * norms[name] and apart > _SHARE * total / 10:
            times = float(np.linalg.norm(two[name])) / max(norms[name], 1e-12)
            fail(f"in batch 0 the gradient of parameter {name!r} is {times:.3g} times that of one process.")


def _compare_parameters(two: ProcessResult, one: ProcessResult, fail: Callable[[str], None]) -> None:
    end = {name: one.final[name].double() for name in one.initial}
    apart = {name: float((two.final[name].double() - end[name]).norm()) for name in end}
    moved = {name: float((end[name] - initial.double()).norm()) for name, initial in one.initial.items()}
    share = np.linalg.norm(list(apart.values())) / max(float(np.linalg.norm(list(moved.values()))), 1e-12)
    if apart and share > _SHARE:
        name = max(apart, key=apart.__getitem__)
        fail(
            f"parameter {name!r} is {apart[name]:.3g} apart after {one.record.batches} batches, in which one process "
            f"moved it by {moved[name]:.3g}."
        )
