"""Training a trial in processes of their own, which share one hash seed, and their processor time."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import free_port
from det_lightning.testing.observation.object_state import ObjectState
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.processor_time import POLL_S, ProcessorMeter, Stuck
from det_lightning.testing.records.record import TrainingRecord
from det_lightning.testing.training.execution import Run, RunPlan, train
from det_lightning.testing.training.trial_source import ImportedTrial

#: The hash seed of the processes that are compared with each other.
HASH_SEED = "0"
# Processes wait this long for each other: as long as one of them may take for its budget on a busy machine.
_PATIENCE_S = 3600


@dataclasses.dataclass(frozen=True)
class SeenValue:
    """A value that a trial's objects hold."""

    text: str
    trains: bool  # whether it is a tensor that requires a gradient
    is_wrapped: bool  # whether it belongs to a wrapped model, optimizer or scheduler


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """What one process did, without objects of the trial's classes, which could not be unpickled."""

    record: TrainingRecord
    samples: list[Counter[bytes] | None]  # for each batch, the checksums of its arrays' rows, if these are samples
    lengths: list[int]  # of each batch
    dataset_length: int | None
    gradients: dict[str, np.ndarray[Any, Any]]  # elements of those of the first update
    validation_batch_size: int | None
    validation_draws: bool  # whether a validation draws random numbers
    initial: dict[str, torch.Tensor]  # the parameters before training
    final: dict[str, torch.Tensor]  # all weights after training
    states: dict[str | int, dict[str, SeenValue]]  # of the trial's objects, at the "start" and the "end"
    failure: tuple[str, str] | None  # its stage and text


def summarize(run: Run) -> ProcessResult:
    """Return the result of a run that an observer watched which keeps weights."""
    seen = run.observer
    return ProcessResult(
        run.record,
        seen.samples,
        seen.lengths,
        seen.dataset_length,
        seen.gradients,
        seen.validation_batch_size,
        seen.evaluation.draws,
        seen.initial_parameters,
        seen.final.get("weights", {}),
        {key: _texts_in(state) for key, state in seen.states.items()},
        None if run.failure is None else (run.failure.stage, run.failure.text),
    )


def _texts_in(state: ObjectState) -> dict[str, SeenValue]:
    return {path: SeenValue(repr(leaf.value), leaf.trains, leaf.holder.wrapped) for path, leaf in state.items()}


@dataclasses.dataclass(frozen=True)
class Role:
    """What one of several processes does: train by a plan, as one rank of a group or alone, and then by others."""

    plans: Sequence[RunPlan]
    rank: int | None = None
    size: int = 1


def train_in_processes(
    source: ImportedTrial, roles: Sequence[Role], folder: Path, hash_seed: str = HASH_SEED
) -> list[list[ProcessResult]]:
    """Return the results of each process, or of the failed one alone; raises Stuck, or NotCompared over the budget."""
    folder.mkdir(parents=True)
    threads = max(1, torch.get_num_threads() // len(roles)) if len(roles) > 1 else torch.get_num_threads()
    arguments = (source.spec, source.directory, roles, folder, free_port("127.0.0.1"), threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", hash_seed)
        processes: Any = spawn(_train_role, arguments, nprocs=len(roles), join=False)  # type: ignore[no-untyped-call]
    crash = None
    pids = [process.pid for process in processes.processes]
    meter = ProcessorMeter(pids, f"training in {len(pids)} processes")
    try:
        # Each call waits for the next process to end.
        while not processes.join(timeout=POLL_S):
            meter.check()
    except (ProcessExitedException, ProcessRaisedException) as e:
        crash = e
    finally:
        for process in processes.processes:
            process.kill()
            process.join()
    results = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("role-*.pkl"))]
    failed = [of_role for of_role in results if of_role[-1].failure is not None]
    if crash is not None and not failed:
        raise Stuck(str(crash))
    return failed[:1] or results


def _train_role(
    index: int, spec: str, directory: Path, roles: Sequence[Role], folder: Path, port: int, threads: int
) -> None:
    role = roles[index]
    distributed = None
    if role.rank is not None:
        rendezvous = f"file://{folder / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=role.rank, world_size=role.size)
        nodes: dict[str, Any] = {"local_rank": role.rank, "local_size": role.size, "cross_rank": 0, "cross_size": 1}
        distributed = DistributedContext(rank=role.rank, size=role.size, pub_port=port, timeout_s=_PATIENCE_S, **nodes)
    source = ImportedTrial(spec, directory)
    results = []
    for plan in role.plans:
        plan = dataclasses.replace(plan, distributed=distributed, threads=plan.threads or threads)
        observer = Observer(source.modules, keeps_weights=True)
        with register_optimizer_step_pre_hook(observer.keep_gradients):
            results.append(summarize(train(source, plan, observer)))
    (folder / f"role-{index}.pkl").write_bytes(pickle.dumps(results))
    if results[-1].failure is not None:
        sys.exit(1)
    if distributed is not None:
        dist.destroy_process_group()
