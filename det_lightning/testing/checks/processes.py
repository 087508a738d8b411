"""Do two processes that share each batch train like one?"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import free_port
from det_lightning.testing.checks import CheckFailed, NotChecked
from det_lightning.testing.checks.training import difference_of_runs, listed
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.records.record import TrainingRecord, number_in
from det_lightning.testing.training.execution import Run, RunPlan, train
from det_lightning.testing.training.runs import TrialRuns
from det_lightning.testing.training.trial_source import ImportedTrial

_SIZE = 2
_TIMEOUT_S = 300
_BATCHES = 4
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# Another order of summation, or averaging the means of uneven parts, stays far below this; a sum for a mean does not.
_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The results of one process, without objects of the trial's classes, which could not be unpickled."""

    record: TrainingRecord
    samples: list[Counter[bytes]]  # for each batch, the checksums of the rows of its arrays
    initial: dict[str, torch.Tensor]  # the parameters before training
    final: dict[str, torch.Tensor]  # all weights after training
    failure: tuple[str, str] | None  # its stage and text

    @classmethod
    def of(cls, run: Run) -> RankResult:
        observer = run.observer
        failure = None if run.failure is None else (run.failure.stage, run.failure.text)
        final = observer.final.get("weights", {})
        return cls(run.record, observer.samples, observer.initial_parameters, final, failure)


def two_agree_with_one(runs: TrialRuns) -> None:
    """Both processes have equal weights after each update and, up to rounding, the same weights as one process.

    Dropout and batch statistics of batch norms are off. If the trial draws random numbers while it trains, they differ
    between processes, so the two processes are compared only with each other.
    """
    options = {"limits": {"limit_val_batches": 2}, "around": without_chance}
    ranks = _in_two_processes(runs, options)
    _require_equal_ranks(ranks)
    # If even two runs of one process differ, two processes differ for the same reason.
    if (difference := difference_of_runs(runs.straight, runs.require(runs.again))) is not None:
        raise NotChecked(
            f"two runs of one process with seed {runs.options.seed} differ already, first in the {difference.kind} "
            f"{difference.name}; the check that it is deterministic under a seed names the causes"
        )
    run = train(runs.source, _plan(runs, "one process", options), Observer(keeps_weights=True))
    one = RankResult.of(runs.succeeded(run))
    if _draws_while_training(one.record):
        return
    _, bypass = runs.probe
    if [sum(of_batch, Counter()) for of_batch in zip(*(rank.samples for rank in ranks), strict=True)] == one.samples:
        _require_same_losses([rank.record for rank in ranks], one.record)
        _require_same_parameters(ranks[0], one)
    elif any("DistributedSampler" in call for call in bypass.process_groups):
        raise CheckFailed(
            "Two processes together do not train on the samples of one.",
            "data that the trial shards itself, and the training loop shards again",
            details=bypass.process_groups,
        )


def two_train(runs: TrialRuns) -> None:
    """Two processes that share each batch train to the end.

    For trials of other libraries, whose weights and random numbers cannot be seen here and so are not compared.
    """
    ranks = _in_two_processes(runs, {})
    if any(rank.record.batches != _BATCHES or not rank.record.named("callback") for rank in ranks):
        trained = " and ".join(str(rank.record.batches) for rank in ranks)
        raise CheckFailed(f"Two processes trained {trained} batches, and should train {_BATCHES}.")


def _plan(runs: TrialRuns, name: str, options: dict[str, Any]) -> RunPlan:
    settings = dataclasses.replace(runs.settings, batches=_BATCHES)
    return runs.plan(name, settings, validate_after=frozenset(), **options)


def _in_two_processes(runs: TrialRuns, options: dict[str, Any]) -> list[RankResult]:
    runs.require(runs.straight)
    size = runs.settings.hparams.get("global_batch_size")
    if isinstance(size, int) and size < _SIZE:
        raise NotChecked(f"global_batch_size is {size}, which two processes cannot share")
    if not isinstance(runs.source, ImportedTrial):
        raise NotChecked(f"{runs.source.name} is not given by the name of its module")
    try:
        ranks = _train_in_processes(runs.source, _plan(runs, "two processes", options))
    except RuntimeError as e:
        raise CheckFailed(f"With two processes the trial does not end. {e}") from None
    if ranks[0].failure is not None:
        stage, text = ranks[0].failure
        if "training loader is empty" in text:
            raise NotChecked("an epoch of this trial has too few batches for two processes")
        seen = runs.probe[1].process_groups
        causes = ["process-group code of the trial, in addition to that of the context"] if seen else []
        raise CheckFailed(f"With two processes the trial fails {stage}:\n{text}", *causes, details=seen)
    return ranks


def _train_in_processes(source: ImportedTrial, plan: RunPlan) -> list[RankResult]:
    """Train in two processes that share each batch; return the result of each, or only the first failed one."""
    plan.storage.mkdir(parents=True)
    arguments = (source.spec, source.directory, plan, free_port("127.0.0.1"))
    processes: Any = spawn(_train_rank, arguments, nprocs=_SIZE, join=False)  # type: ignore[no-untyped-call]
    end = time.monotonic() + _TIMEOUT_S
    crash = None
    try:
        # Each call waits for the next process to end.
        while not processes.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise RuntimeError(f"They did not end within {_TIMEOUT_S} s.")
    except (ProcessExitedException, ProcessRaisedException) as e:
        crash = e
    finally:
        for process in processes.processes:
            process.kill()
            process.join()
    results = [pickle.loads(file.read_bytes()) for file in sorted(plan.storage.glob("rank-*.pkl"))]
    failed = [result for result in results if result.failure is not None]
    if crash is not None and not failed:
        raise RuntimeError(str(crash))
    return failed[:1] or results


def _train_rank(rank: int, spec: str, directory: Path, plan: RunPlan, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{plan.storage / 'rendezvous'}", rank=rank, world_size=_SIZE)
    nodes: dict[str, Any] = {"local_rank": rank, "local_size": _SIZE, "cross_rank": 0, "cross_size": 1}
    distributed = DistributedContext(rank=rank, size=_SIZE, pub_port=port, timeout_s=_TIMEOUT_S, **nodes)
    plan = dataclasses.replace(plan, distributed=distributed, threads=max(1, torch.get_num_threads() // _SIZE))
    run = train(ImportedTrial(spec, directory), plan, Observer(keeps_weights=True))
    (plan.storage / f"rank-{rank}.pkl").write_bytes(pickle.dumps(RankResult.of(run)))
    if run.failure is not None:
        sys.exit(1)
    dist.destroy_process_group()


@contextlib.contextmanager
def without_chance() -> Iterator[None]:
    """Switch off dropout and batch statistics in batch norms: both depend on how a batch is shared."""
    attention = functional.scaled_dot_product_attention
    batch_norm = functional.batch_norm

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def with_running_statistics(
        inputs: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        own = training and running_mean is None
        return batch_norm(inputs, running_mean, running_var, weight, bias, own, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in _DROPOUTS:
            patch.setattr(functional, name, lambda inputs, *args, **kwargs: inputs)
        patch.setattr(functional, "scaled_dot_product_attention", without_dropout)
        patch.setattr(functional, "batch_norm", with_running_statistics)
        yield


def _require_equal_ranks(ranks: Sequence[RankResult]) -> None:
    for events in zip(*(rank.record.named("batch_end") for rank in ranks), strict=False):
        names = [name for name in ranks[0].initial if len({repr(event["weights"].get(name)) for event in events}) > 1]
        if names:
            batch = events[0]["batch"]
            raise CheckFailed(
                f"Two processes have different weights after batch {batch}: {listed(names)}.",
                "gradients that are not exchanged: loss.backward() instead of context.backward(loss)",
                "a forward pass through the original model instead of the one that context.wrap_model() returned",
                "weights that the trial changes itself, differently in each process",
            )


def _draws_while_training(record: TrainingRecord) -> bool:
    """Return whether random numbers are drawn in ``train_batch()``, or between the batches of an epoch to load data."""
    starts = record.named("batch_start")
    ends = record.named("batch_end")
    pairs = list(zip(starts, ends, strict=True))
    followed = zip(pairs, starts[1:], strict=False)
    pairs += [(end, later) for (start, end), later in followed if start["epoch"] == later["epoch"]]
    return any(before["random"] != after["random"] for before, after in pairs)


_CAUSES = [
    "a loss that is a sum over the batch instead of a mean",
    "a learning rate or loss that depends on the number of processes, or on the batch size of one of them",
]


def _require_same_losses(ranks: Sequence[TrainingRecord], one: TrainingRecord) -> None:
    for event, *events in zip(*(record.named("batch_end") for record in (one, *ranks)), strict=True):
        for name, described in event["metrics"].items():
            single = number_in(described)
            if single is None or "loss" not in name.lower():
                continue
            values = [number_in(of_rank["metrics"].get(name)) for of_rank in events]
            two = float(np.mean([np.nan if value is None else value for value in values]))
            if not abs(two - single) <= _SHARE * max(abs(two), abs(single)) + 1e-4:
                raise CheckFailed(
                    f"Two processes do not train like one: metric {name!r} of batch {event['batch']} is {two:.6g} on "
                    f"average in two, and {single:.6g} in one, {abs(two - single):.3g} apart.",
                    *_CAUSES,
                )


def _require_same_parameters(two: RankResult, one: RankResult) -> None:
    end = {name: one.final[name].double() for name in one.initial}
    apart = {name: float((two.final[name].double() - end[name]).norm()) for name in end}
    moved = {name: float((end[name] - initial.double()).norm()) for name, initial in one.initial.items()}
    of_all = np.linalg.norm(list(apart.values())) / max(float(np.linalg.norm(list(moved.values()))), 1e-12)
    if apart and of_all > _SHARE:
        name = max(apart, key=apart.__getitem__)
        raise CheckFailed(
            f"Two processes do not train like one: parameter {name!r} is {apart[name]:.3g} apart after "
            f"{one.record.batches} batches, in which one process moved it by {moved[name]:.3g}.",
            *_CAUSES,
        )
