"""The runs of a trial in two processes that share each batch, and in one, with which they are compared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from det_lightning.adapters.strategies.ddp import FIND_UNUSED
from det_lightning.testing.checks import CheckFailed, NotCompared
from det_lightning.testing.observation.evaluation_watch import DROPOUTS
from det_lightning.testing.observation.shortened_data import ShortenedData
from det_lightning.testing.processor_time import Stuck
from det_lightning.testing.records.record import RunSettings
from det_lightning.testing.training.execution import Run, RunPlan
from det_lightning.testing.training.separate import ProcessResult, Role, train_in_processes
from det_lightning.testing.training.trial_source import ImportedTrial, TrialSource

_SIZE = 2
_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class ProcessRuns:
    """The results of two processes together, and of one alone, of the same length and under the same hash seed."""

    ranks: list[ProcessResult]
    one: ProcessResult
    halved: ProcessResult  # one process that validates with half as many samples in a batch
    shards_here: bool  # whether det_lightning divides the training data
    has_own_batches: bool  # whether a batch_sampler of the trial makes the training batches
    sets_batch_size: bool  # whether there is a global batch size to share
    remarks: list[str]


def train_two_and_one(
    source: TrialSource, straight: Run, make_plan: Callable[..., RunPlan], folder: Path, own_groups: Collection[str]
) -> ProcessRuns:
    """Train in two processes and in one; raises CheckFailed if the two fail, NotCompared if nothing can be compared.

    ``straight`` is a run in this process, and ``own_groups`` are the calls in which the trial handles processes.
    """
    if not isinstance(source, ImportedTrial):
        raise NotCompared(f"{source.name} is not given by the name of its module")
    seen = straight.observer
    if seen.full_batches == 0:
        raise NotCompared("the training data have fewer samples than a batch of one process")
    settings = dataclasses.replace(
        _shareable(straight.plan.settings), batches=min(_BATCHES, seen.full_batches or _BATCHES)
    )
    remarks: list[str] = []
    results = _train(source, _plan_roles(make_plan, settings, seen.validation_batch_size), folder / "as it is")
    if (failure := results[0][-1].failure) is not None and "got no gradient in a batch" in failure[1]:
        roles = _plan_roles(make_plan, settings, seen.validation_batch_size, FIND_UNUSED)
        results = _train(source, roles, folder / "with unused parameters")
        last = failure[1].splitlines()[-1].partition(": ")[2].partition(". ")[0]
        remarks.append(f"with several processes this trial needs strategy={FIND_UNUSED!r}: {last}")
    _require_success(results, own_groups)
    (first,), (second,), (halved, one) = results
    has_size = "global_batch_size" in settings.hparams
    return ProcessRuns([first, second], one, halved, seen.shards_data, seen.has_own_batches, has_size, remarks)


def train_two(
    source: TrialSource, settings: RunSettings, make_plan: Callable[..., RunPlan], folder: Path
) -> list[ProcessResult]:
    """Train in two processes, whose results are not compared with those of one."""
    if not isinstance(source, ImportedTrial):
        raise NotCompared(f"{source.name} is not given by the name of its module")
    plan = make_plan("two", dataclasses.replace(settings, batches=_BATCHES), validate_after=frozenset())
    results = _train(source, [Role([plan], rank, _SIZE) for rank in range(_SIZE)], folder)
    _require_success(results, ())
    return [of_rank[-1] for of_rank in results]


def train_halves(
    source: TrialSource, settings: RunSettings, make_plan: Callable[..., RunPlan], folder: Path
) -> ProcessResult:
    """Train one process on the batches of two, rank after rank, without a step between those of the first batch."""
    assert isinstance(source, ImportedTrial)  # two processes have trained
    hparams = {**settings.hparams, "global_batch_size": settings.hparams["global_batch_size"] // _SIZE}
    plan = make_plan(
        "halves",
        dataclasses.replace(settings, hparams=hparams, batches=_SIZE, aggregation_frequency=_SIZE),
        data=ShortenedData(loads_here=True),
        limits={"limit_val_batches": 1},
        validate_after=frozenset(),
        validates_first=True,
        around=without_chance,
    )
    ((result,),) = _train(source, [Role([plan])], folder)
    return result


def _plan_roles(
    make_plan: Callable[..., RunPlan], settings: RunSettings, batch_size: int | None, strategy: str | None = None
) -> list[Role]:
    """Return the roles of two processes, and of one beside them."""
    data = ShortenedData(validation_samples=None if batch_size is None else 4 * batch_size, loads_here=True)
    options: dict[str, Any] = {
        "limits": {"limit_val_batches": 16},
        "validate_after": frozenset(),
        "validates_first": True,
        "around": without_chance,
    }
    plan = make_plan("two processes", settings, data=data, strategy=strategy, **options)
    halved_data = dataclasses.replace(data, halves_validation_batch=True)
    once = dataclasses.replace(settings, batches=1)
    halved = make_plan("half batches", once, data=halved_data, **options)
    one = make_plan("one process", settings, data=data, **options)
    return [*(Role([plan], rank, _SIZE) for rank in range(_SIZE)), Role([halved, one])]


def _train(source: ImportedTrial, roles: list[Role], folder: Path) -> list[list[ProcessResult]]:
    try:
        return train_in_processes(source, roles, folder)
    except Stuck as e:
        raise CheckFailed(f"With two processes the trial does not end. {e}") from None


def _shareable(settings: RunSettings) -> RunSettings:
    """Return settings with a batch that two processes can share evenly."""
    size = settings.hparams.get("global_batch_size")
    if not isinstance(size, int) or size % _SIZE == 0:
        return settings
    return dataclasses.replace(settings, hparams={**settings.hparams, "global_batch_size": max(_SIZE, size - 1)})


def _require_success(results: list[list[ProcessResult]], own_groups: Collection[str]) -> None:
    failure = results[0][-1].failure
    if failure is None:
        return
    stage, text = failure
    if "training loader is empty" in text:
        raise NotCompared("an epoch of this trial has too few batches for two processes")
    if "uninitialized parameter" in text:
        raise NotCompared("wrap_model() gets a lazy model; call it once before, for several processes")
    causes = ["process-group code of the trial, in addition to that of the context"] if own_groups else []
    raise CheckFailed(f"With two processes the trial fails {stage}:\n{text}", *causes, details=own_groups)


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
        for name in DROPOUTS:
            patch.setattr(functional, name, lambda inputs, *args, **kwargs: inputs)
        patch.setattr(functional, "scaled_dot_product_attention", without_dropout)
        patch.setattr(functional, "batch_norm", with_running_statistics)
        yield
