"""Training a trial in several processes of this machine."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from det_lightning.core._distributed import DistributedContext
from det_lightning.core._ports import free_port
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.records.record import TrainingRecord
from det_lightning.testing.training.execution import Run, train
from det_lightning.testing.training.plans import RunPlan
from det_lightning.testing.training.trial_source import ImportedTrial


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one process saw."""

    record: TrainingRecord  # of its training
    samples: collections.Counter[bytes]  # how often the rows of its first batch's arrays occur
    initial: dict[str, torch.Tensor]  # the parameters before training
    final: dict[str, torch.Tensor]  # the parameters after training
    failure: tuple[str, str] | None  # stage and text of what ended the run

    @classmethod
    def of(cls, run: Run) -> RankResult:
        """Return what was seen in ``run``."""
        initial = run.observer.initial_parameters
        weights = run.observer.final.get("weights", {})
        final = {name: weights[name] for name in initial if name in weights}
        failure = None if run.failure is None else (run.failure.stage, run.failure.text)
        return cls(run.record, run.observer.samples, initial, final, failure)


def train_in_processes(source: ImportedTrial, plan: RunPlan, size: int = 2, timeout_s: float = 300) -> list[RankResult]:
    """Train in ``size`` processes that share each batch; return what each saw, or the first that failed.

    The plan has to be picklable.

    Raises:
        RuntimeError: a process ended without a result, or they took too long.
    """
    plan.storage.mkdir(parents=True)
    arguments = (source.spec, source.directory, plan, size, free_port("127.0.0.1"), timeout_s)
    processes: Any = spawn(_train_rank, arguments, nprocs=size, join=False)  # type: ignore[no-untyped-call]
    end = time.monotonic() + timeout_s
    crash = None
    try:
        # Each call waits for the next process to end.
        while not processes.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise RuntimeError(f"They did not end within {timeout_s:g} s.")
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


def _train_rank(rank: int, spec: str, directory: Path, plan: RunPlan, size: int, port: int, timeout_s: float) -> None:
    """Train as one rank, and write what was seen."""
    dist.init_process_group("gloo", init_method=f"file://{plan.storage / 'meeting'}", rank=rank, world_size=size)
    distributed = DistributedContext(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        cross_rank=0,
        cross_size=1,
        pub_port=port,
        timeout_s=timeout_s,
    )
    threads = max(1, torch.get_num_threads() // size)
    plan = dataclasses.replace(plan, distributed=distributed, threads=threads)
    run = train(ImportedTrial(spec, directory), plan, Observer(keeps_parameters=True))
    (plan.storage / f"rank-{rank}.pkl").write_bytes(pickle.dumps(RankResult.of(run)))
    if run.failure is not None:
        sys.exit(1)
    dist.destroy_process_group()
