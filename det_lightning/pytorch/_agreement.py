"""Checks that all ranks build the same trial; without them some would wait for the others forever."""

from __future__ import annotations

from typing import Any

import torch

from det_lightning import errors
from det_lightning.core._distributed import DistributedContext

_WAY_OUT = (
    "Every rank must build the same trial: nothing in its __init__ may depend on the rank, or on random numbers that "
    "are not seeded alike."
)


def require_same_model(distributed: DistributedContext, index: int, model: torch.nn.Module) -> None:
    """Raise, on every rank, if the ranks do not all wrap such a model now; all ranks must call it.

    The message names what each wraps, and the first parameter that differs. ``index`` models were wrapped before.
    """
    if distributed.size > 1:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        _require_same(distributed, f"wraps model {index}, a {type(model).__name__}", shapes)


def require_same_counts(distributed: DistributedContext, models: int, optimizers: int, schedulers: int) -> None:
    """Raise, on every rank, if the ranks have wrapped different numbers of parts; all ranks must call it."""
    if distributed.size > 1:
        has = f"{models} model(s), {optimizers} optimizer(s), {schedulers} scheduler(s)"
        _require_same(distributed, f"trains {has}", {})


def _require_same(distributed: DistributedContext, does: str, shapes: dict[str, tuple[int, ...]]) -> None:
    found = [_checked(entry) for entry in distributed.allgather(("det_lightning", does, shapes))]
    if any(entry[0] != does for entry in found):
        each = "; ".join(f"rank {rank} {theirs}" for rank, (theirs, _) in enumerate(found))
        raise errors.InvalidExperimentException(f"The ranks do not do the same: {each}. {_WAY_OUT}")
    for rank, (_, theirs) in enumerate(found):
        if list(theirs.items()) != list(found[0][1].items()):
            raise errors.InvalidExperimentException(
                f"The ranks do not do the same: each {does}, but {_first_difference(found[0][1], theirs, rank)}. "
                f"{_WAY_OUT}"
            )


def _checked(entry: Any) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return what a rank does; one that is elsewhere may have sent anything."""
    if isinstance(entry, tuple) and len(entry) == 3 and entry[0] == "det_lightning":
        return entry[1], entry[2]
    return f"exchanges {entry!r:.100}", {}


def _first_difference(first: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]], rank: int) -> str:
    for (name, shape), (their_name, their_shape) in zip(first.items(), theirs.items(), strict=False):
        if (name, shape) != (their_name, their_shape):
            return f"its {name} has the shape {shape} on rank 0, and its {their_name} {their_shape} on rank {rank}"
    return f"it has {len(first)} parameters on rank 0, and {len(theirs)} on rank {rank}"
