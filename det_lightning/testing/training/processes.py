"""Trains a trial in two processes on this machine."""

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
from det_lightning.core._topology import free_port
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.records.record import TrainingRecord
from det_lightning.testing.training.execution import Run, RunPlan, train
from det_lightning.testing.training.trial_source import ImportedTrial

_SIZE = 2
_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The results of one process, without objects of the trial's classes, which could not be unpickled."""

    record: TrainingRecord
    samples: list[collections.Counter[bytes]]  # for each batch, the checksums of the rows of its arrays
    initial: dict[str, torch.Tensor]  # the parameters before training
    final: dict[str, torch.Tensor]  # all weights after training
    failure: tuple[str, str] | None  # its stage and text

    @classmethod
    def of(cls, run: Run) -> RankResult:
        observer = run.observer
        failure = None if run.failure is None else (run.failure.stage, run.failure.text)
        return cls(
            run.record, observer.samples, observer.initial_parameters, observer.final.get("weights", {}), failure
        )


def train_in_two_processes(source: ImportedTrial, plan: RunPlan) -> list[RankResult]:
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
    distributed = DistributedContext(
        rank=rank,
        size=_SIZE,
        local_rank=rank,
        local_size=_SIZE,
        cross_rank=0,
        cross_size=1,
        pub_port=port,
        timeout_s=_TIMEOUT_S,
    )
    plan = dataclasses.replace(plan, distributed=distributed, threads=max(1, torch.get_num_threads() // _SIZE))
    run = train(ImportedTrial(spec, directory), plan, Observer(keeps_parameters=True))
    (plan.storage / f"rank-{rank}.pkl").write_bytes(pickle.dumps(RankResult.of(run)))
    if run.failure is not None:
        sys.exit(1)
    dist.destroy_process_group()
