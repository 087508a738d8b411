"""States of sharded models and optimizers: gathered on the chief for saving, distributed when they are loaded."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from det_lightning.checkpoint import safe_load
from det_lightning.distributed.shard_files import read_shard


def gather_tensors(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict with whole tensors in main memory on the chief, and an empty one elsewhere; all ranks call it.

    Tensors are gathered one at a time, so other ranks never hold more than one whole tensor. The returned tensors share
    no memory with those that are trained.
    """
    chief = dist.get_rank() == 0
    gathered = {}
    for key, value in values.items():
        if isinstance(value, DTensor):
            whole = value.full_tensor().detach()
            if chief:
                gathered[key] = _own(whole, value.to_local())
        elif chief:
            gathered[key] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    return gathered


def _own(whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    # The only shard of a single rank may be the whole itself.
    same = whole.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
    return whole.cpu().clone() if same else whole.cpu()


def gather_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, with whole tensors on the chief, and an empty dict elsewhere."""
    state = optimizer.state_dict()
    # Parameters are in the order of their first step, which is the same on all ranks, as their gradients are.
    gathered = {index: gather_tensors(values) for index, values in state["state"].items()}
    return {**state, "state": gathered} if dist.get_rank() == 0 else {}


def shard_like(whole: torch.Tensor | safe_load.StoredTensor, parameter: torch.Tensor) -> DTensor:
    """Return a copy of this rank's part of a tensor that every rank holds or can read, sharded like ``parameter``."""
    assert isinstance(parameter, DTensor)
    if isinstance(whole, safe_load.StoredTensor):
        return read_shard(whole, parameter)
    # Every rank needs the whole of what an optimizer keeps in another shape.
    placements = parameter.placements if whole.shape == parameter.shape else [Replicate()] * parameter.device_mesh.ndim
    sharded = distribute_tensor(whole.detach(), parameter.device_mesh, placements, src_data_rank=None)
    return cast(DTensor, sharded.clone())


def _is_tensor(value: Any) -> bool:
    """Return whether a value of a loaded state stands for a tensor, which may be sharded."""
    return isinstance(value, torch.Tensor | safe_load.StoredTensor)


def shard_if_alike(value: Any, target: Any) -> Any:
    """Return a whole tensor sharded like ``target`` if that is sharded and of the same shape; otherwise ``value``."""
    if isinstance(target, DTensor) and _is_tensor(value) and value.shape == target.shape:
        return shard_like(value, target)
    return value.read() if isinstance(value, safe_load.StoredTensor) else value


def load_into_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the whole state of an optimizer whose parameters may be sharded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    # If their numbers differ, the optimizer itself says so.
    by_index = dict(zip(indices, parameters, strict=False))
    fitted = {
        index: {key: _fit(value, by_index.get(index)) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": fitted})


def _fit(value: Any, parameter: Any) -> Any:
    if _is_tensor(value) and value.dim() > 0 and isinstance(parameter, DTensor):
        return shard_like(value, parameter)
    return value.read() if isinstance(value, safe_load.StoredTensor) else value
