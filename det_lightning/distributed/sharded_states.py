"""States of sharded models and optimizers: gathered on the chief or written by all ranks, and sharded again.

Change here: ``write_parts`` has torch write, and name, the file of each rank.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from det_lightning import errors
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.layout import SHARDS_DIR
from det_lightning.checkpoint.format.shards import StoredPart, index_file, map_tensors, write_index


def gather_tensors(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict with whole tensors in main memory on the chief, an empty dict elsewhere; all ranks call this.

    Tensors are gathered one by one, so other ranks hold at most one whole tensor. The tensors share no memory with
    the model.
    """
    chief = dist.get_rank() == 0
    gathered = {}
    for key, value in values.items():
        if isinstance(value, DTensor):
            whole = value.full_tensor().detach()
            if chief:
                # The only shard of a single rank may be the whole itself.
                is_own = whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()
                gathered[key] = whole.cpu().clone() if is_own else whole.cpu()
        elif chief:
            gathered[key] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    return gathered


def gather_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, with whole tensors on the chief, and an empty dict elsewhere."""
    state = optimizer.state_dict()
    # Parameters are in the order of the first step, the same on all ranks, since gradients are the same.
    gathered = {index: gather_tensors(values) for index, values in state["state"].items()}
    return {**state, "state": gathered} if dist.get_rank() == 0 else {}


def shard_like(whole: torch.Tensor | safe_load.StoredTensor, parameter: torch.Tensor) -> DTensor:
    """Return a copy of this rank's part of a whole tensor, sharded like ``parameter``."""
    assert isinstance(parameter, DTensor)
    if isinstance(whole, safe_load.StoredTensor):
        return read_shard(whole, parameter)
    # Every rank needs the whole of what an optimizer keeps in another shape.
    placements = parameter.placements if whole.shape == parameter.shape else [Replicate()] * parameter.device_mesh.ndim
    sharded = distribute_tensor(whole.detach(), parameter.device_mesh, placements, src_data_rank=None)
    return cast(DTensor, sharded.clone())


def shard_if_alike(value: Any, target: Any, any_shape: bool = False) -> Any:
    """Return a whole tensor sharded like ``target``, if that is sharded and has the same shape; otherwise ``value``.

    With ``any_shape``, everything but a scalar is sharded.
    """
    is_tensor = isinstance(value, torch.Tensor | safe_load.StoredTensor)
    if is_tensor and isinstance(target, DTensor) and (value.dim() > 0 if any_shape else value.shape == target.shape):
        return shard_like(value, target)
    return value.read() if isinstance(value, safe_load.StoredTensor) else value


def load_into_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the whole state of an optimizer with parameters that may be sharded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    # If the numbers differ, the optimizer raises an error.
    by_index = dict(zip(indices, parameters, strict=False))
    fitted = {
        index: {key: shard_if_alike(value, by_index.get(index), any_shape=True) for key, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": fitted})


def take_shards(values: Any, name: str, shards: dict[str, torch.Tensor]) -> Any:
    """Move sharded tensors from ``values`` to ``shards``; return ``values`` with tensors on the meta device instead.

    Other tensors are moved to main memory. ``name`` is the name of ``values``, and a part of all names in ``shards``.
    """

    def take(path: str, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value.detach().cpu()
        if _find_divided_dim(value) is None:
            return value.full_tensor().detach().cpu()
        shards[path] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return map_tensors(values, take, name, torch.Tensor)


def write_parts(shards: Mapping[str, torch.Tensor], directory: pathlib.Path, rank: int) -> list[str]:
    """Write this rank's part of ``shards`` into a checkpoint's directory; return the paths of the files there.

    All ranks call this, with different directories or the same. Raise a ``CheckpointError`` on a rank that cannot
    write; other ranks then return an empty list.
    """
    # Importing takes a tenth of a second, not needed in a run without shards.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = directory / SHARDS_DIR
    folder.mkdir(exist_ok=True)
    try:
        written = save(dict(shards), storage_writer=FileSystemWriter(folder, thread_count=1))
    except CheckpointException as e:
        if rank not in e.failures:
            return []
        raise errors.CheckpointError(f"{e.failures[rank][0]}") from e
    parts: dict[str, StoredPart] = {}
    for where, stored in written.storage_data.items():
        tensor = shards[where.fqn]
        assert isinstance(tensor, DTensor)
        dim = _find_divided_dim(tensor)
        assert dim is not None
        size = tensor.to_local().shape[dim]
        if size and stored.relative_path.startswith(f"__{rank}_"):
            begin = where.offset[dim]
            parts[where.fqn] = StoredPart(dim, begin, size, stored.relative_path, stored.offset, stored.length)
    write_index(directory / index_file(rank), parts)
    own = sorted({f"{SHARDS_DIR}/{part.file}" for part in parts.values()})
    return [*own, index_file(rank), *([f"{SHARDS_DIR}/.metadata"] if rank == 0 else [])]


def read_shard(stored: safe_load.StoredTensor, parameter: DTensor) -> DTensor:
    """Return a stored tensor sharded like ``parameter``, reading only this rank's part."""
    mesh = parameter.device_mesh
    dim = _find_divided_dim(parameter) if stored.shape == parameter.shape else None
    if dim is None:
        # Every rank needs the whole of what an optimizer keeps in another shape.
        return DTensor.from_local(stored.read().to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    count = parameter.to_local().shape[dim]
    rows = torch.arange(stored.shape[dim]).chunk(mesh.size())
    rank = mesh.get_local_rank()
    begin = int(rows[rank][0]) if rank < len(rows) else stored.shape[dim]
    local = stored.read_rows(dim, begin, count).to(parameter.device)
    whole = torch.empty(stored.shape, device="meta")
    placements = parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _find_divided_dim(tensor: DTensor) -> int | None:
    """Return the dimension along which the ranks divide a tensor; None if every rank holds the whole."""
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return None
    if len(tensor.placements) == 1 and isinstance(tensor.placements[0], Shard):
        return tensor.placements[0].dim
    raise NotImplementedError(f"A sharded checkpoint holds tensors divided in one dimension; got {tensor.placements}.")
