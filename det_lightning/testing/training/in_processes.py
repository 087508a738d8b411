"""Training in separate processes: two with shared batches, and a single process for comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from det_lightning.adapters.strategies.per_model import FIND_UNUSED
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import free_port
from det_lightning.testing.checks import CheckFailed, NotCompared, list_names
from det_lightning.testing.observation.call_watch import DROPOUTS
from det_lightning.testing.observation.shortened_data import ShortenedData
from det_lightning.testing.observation.source_scan import TrialCode, assigns, calls
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Run, RunPlan, train
from det_lightning.testing.training.trial_source import ImportedTrial, TrialSource

#: The hash seed of processes for comparison with each other.
HASH_SEED = "0"
#: The number of processes that share a batch.
SIZE = 2
_BATCHES = 4
# Processes wait this long for each other, also on a busy machine.
_PATIENCE_S = 300

PlanMaker = Callable[..., RunPlan]
#: The plans that a process executes one after another, and its rank in a group of two; None for a process alone.
Role = tuple[Sequence[RunPlan], int | None]


@dataclasses.dataclass(frozen=True)
class ProcessRuns:
    """The runs of two processes together, and of a process alone, of equal length and under equal hash seeds."""

    ranks: list[Run]
    one: Run
    elsewhere: Run  # in the process alone, as long as the runs in this process
    halved: Run  # one process that validates with half as many samples in a batch
    sets_batch_size: bool  # whether there is a global batch size to share
    remarks: list[str]


def train_in_processes(source: TrialSource, roles: Sequence[Role], hash_seed: str = HASH_SEED) -> list[list[Run]]:
    """Return the runs of each process, or of the failed process alone.

    Raises NotCompared if the trial cannot be imported by name, and CheckFailed if a process crashes.
    """
    if not isinstance(source, ImportedTrial):
        raise NotCompared(f"{source.name} was not given as MODULE:CLASS")
    threads = max(1, torch.get_num_threads() // len(roles))
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder, pytest.MonkeyPatch.context() as patch:
        arguments = (source.spec, source.directory, roles, Path(folder), free_port("127.0.0.1"), threads)
        patch.setenv("PYTHONHASHSEED", hash_seed)
        processes: Any = spawn(_train_role, arguments, nprocs=len(roles), join=False)  # type: ignore[no-untyped-call]
        crash = None
        try:
            while not processes.join():  # each call waits for the next process to end
                pass
        except (ProcessExitedException, ProcessRaisedException) as e:
            crash = e
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        results = [pickle.loads(file.read_bytes()) for file in sorted(Path(folder).glob("role-*.pkl"))]
    failed = [of_role for of_role in results if of_role[-1].failure is not None]
    if crash is not None and not failed:
        raise CheckFailed(f"{source.name} crashes its process: {crash}") from None
    return failed[:1] or results


def _train_role(
    index: int, spec: str, directory: Path, roles: Sequence[Role], folder: Path, port: int, threads: int
) -> None:
    plans, rank = roles[index]
    multiprocessing.set_start_method(None, force=True)  # which a trial may set itself, once
    distributed = None
    if rank is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(SIZE))  # like torchrun
        rendezvous = f"file://{folder / 'rendezvous'}"
        patience = datetime.timedelta(seconds=_PATIENCE_S)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=SIZE, timeout=patience)
        nodes: dict[str, Any] = {"local_rank": rank, "local_size": SIZE, "cross_rank": 0, "cross_size": 1}
        distributed = DistributedContext(rank=rank, size=SIZE, pub_port=port, timeout_s=_PATIENCE_S, **nodes)
    source = ImportedTrial(spec, directory)
    results = []
    for plan in plans:
        here = dataclasses.replace(plan, distributed=distributed, threads=plan.threads or threads)
        results.append(dataclasses.replace(train(source, here), plan=plan))
    (folder / f"role-{index}.pkl").write_bytes(pickle.dumps(results))
    if results[-1].failure is not None:
        sys.exit(1)
    if distributed is not None:
        dist.destroy_process_group()


def train_two_and_one(
    source: TrialSource,
    straight: Run,
    make_plan: PlanMaker,
    code: TrialCode,
    elsewhere: RunPlan,
    builds_once: bool = False,
) -> ProcessRuns:
    """Train in two processes and in one; ``straight`` is a run in this process, and ``elsewhere`` the plan of another.

    If the trial ``builds_once`` in a process, each of these single runs has a process of its own.
    Raises CheckFailed if the two processes fail, and NotCompared if there is nothing to compare.
    """
    seen = straight.observer
    if seen.training.full_batches == 0:
        raise NotCompared("the training data have fewer samples than a batch of one process")
    settings = share_evenly(straight.plan.settings)
    settings = dataclasses.replace(settings, batches=min(_BATCHES, seen.training.full_batches or _BATCHES))
    batch_size = seen.validation.batch_size
    remarks: list[str] = []
    plan_roles = functools.partial(_plan_roles, make_plan, settings, batch_size, elsewhere, builds_once)
    results = train_in_processes(source, plan_roles())
    freezing = [f"{line} freezes parameters" for line in code.find(calls("requires_grad_"), assigns("requires_grad"))]
    if (failure := results[0][-1].failure) is not None and "got no gradient in a batch" in failure.text:
        reason = failure.text.splitlines()[-1].partition(": ")[2].partition(". ")[0]
        if late := [name for name, began in seen.frozen.items() if not began]:
            raise CheckFailed(
                f"With two processes the trial fails {failure.stage}: {reason}.",
                "parameters that are frozen too late: call requires_grad_(False) before context.wrap_model(), which "
                "connects the processes",
                details=[f"frozen after wrap_model(): {list_names(late)}", *freezing],
            )
        results = train_in_processes(source, plan_roles(FIND_UNUSED))
        remarks.append(f"with several processes this trial needs strategy={FIND_UNUSED!r}: {reason}")
    elif frozen := [name for name, began in seen.frozen.items() if began]:
        where = [*freezing, "the trial freezes parameters"][0]
        remarks.append(f"{where} ({list_names(frozen)}): several processes need strategy={FIND_UNUSED!r} from then on")
    _require_success(results, seen.calls["process group"])
    first, second, another, halved, one = itertools.chain.from_iterable(results)
    return ProcessRuns([first, second], one, another, halved, "global_batch_size" in settings.hparams, remarks)


def make_options(data: ShortenedData) -> dict[str, Any]:
    """Return the options of a plan that validates at once, and does nothing that depends on how a batch is shared."""
    start = {"validate_after": frozenset(), "validates_first": True, "around": remove_chance}
    recorded = {"reads_state": True, "keeps_weights": True}
    return {"data": data, "limits": {"limit_val_batches": 16}, "recorded": recorded, **start}


def _plan_roles(
    make_plan: PlanMaker,
    settings: RunSettings,
    batch_size: int | None,
    elsewhere: RunPlan,
    builds_once: bool,
    strategy: str | None = None,
) -> list[Role]:
    """Return the roles of two processes, and of one process for comparison, or of one for each of its plans."""
    data = ShortenedData(validation_samples=None if batch_size is None else 4 * batch_size, loads_here=True)
    options = make_options(data)
    plan = make_plan("two processes", settings, strategy=strategy, **options)
    once = dataclasses.replace(settings, batches=1)
    half_data = dataclasses.replace(data, halves_validation_batch=True)
    halved = make_plan("half batches", once, **{**options, "data": half_data})
    one = make_plan("one process", settings, **options)
    alone = [elsewhere, halved, one]
    groups = [[each] for each in alone] if builds_once else [alone]
    return [*(([plan], rank) for rank in range(SIZE)), *((group, None) for group in groups)]


def share_evenly(settings: RunSettings) -> RunSettings:
    """Return settings with a batch size that two processes can share."""
    size = settings.hparams.get("global_batch_size")
    if not isinstance(size, int) or size % SIZE == 0:
        return settings
    return dataclasses.replace(settings, hparams={**settings.hparams, "global_batch_size": max(SIZE, size - 1)})


def _require_success(results: list[list[Run]], own_groups: Collection[str]) -> None:
    failure = results[0][-1].failure
    if failure is None:
        return
    stage = failure.stage
    text = failure.text
    if "training loader is empty" in text:
        raise NotCompared("an epoch of this trial has too few batches for two processes")
    if "uninitialized parameter" in text:
        raise NotCompared("wrap_model() gets a lazy model; for several processes, call the model once before")
    causes = ["process-group code of the trial, in addition to that of the context"] if own_groups else []
    raise CheckFailed(f"With two processes the trial fails {stage}:\n{text}", *causes, details=own_groups)


@contextlib.contextmanager
def remove_chance() -> Iterator[None]:
    """Switch off dropout and batch statistics in batch norms: both depend on how a batch is shared."""
    attention = functional.scaled_dot_product_attention
    batch_norm = functional.batch_norm

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def with_running_statistics(
        input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
        training: bool = False, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        own = training and running_mean is None
        return batch_norm(input, running_mean, running_var, weight, bias, own, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in DROPOUTS:
            patch.setattr(functional, name, lambda input, *args, **kwargs: input)
        patch.setattr(functional, "scaled_dot_product_attention", without_dropout)
        patch.setattr(functional, "batch_norm", with_running_statistics)
        yield
