"""What each rank holds of sharded tensors: each rank writes it into a checkpoint, and reads it from there."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from det_lightning import errors
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.layout import SHARDS_DIR
from det_lightning.checkpoint.format.shards import StoredPart, index_file, map_tensors, write_index


def take_shards(values: Any, name: str, shards: dict[str, torch.Tensor]) -> Any:
    """Return ``values`` with a tensor on the meta device in place of each sharded one, which is added to ``shards``.

    Other tensors are moved to main memory. ``name`` is the name of ``values``, and a part of all names in ``shards``.
    """

    def take(path: str, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value.detach().cpu()
        if _divided_dim(value) is None:
            return value.full_tensor().detach().cpu()
        shards[path] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return map_tensors(values, take, name, torch.Tensor)


def write_parts(shards: Mapping[str, torch.Tensor], directory: pathlib.Path, rank: int) -> list[str]:
    """Write what this rank holds of ``shards`` into a checkpoint's directory; return the paths of the files there.

    All ranks call it, each with its own directory or all with the same. Raise a ``CheckpointError`` on a rank that
    cannot write; the others then return an empty list.
    """
    # Importing takes a tenth of a second, which a run that writes no shards need not wait for.
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
        dim = _divided_dim(tensor)
        assert dim is not None
        size = tensor.to_local().shape[dim]
        if size and stored.relative_path.startswith(f"__{rank}_"):
            begin = where.offset[dim]
            parts[where.fqn] = StoredPart(dim, begin, size, stored.relative_path, stored.offset, stored.length)
    write_index(directory / index_file(rank), parts)
    own = sorted({f"{SHARDS_DIR}/{part.file}" for part in parts.values()})
    return [*own, index_file(rank), *([f"{SHARDS_DIR}/.metadata"] if rank == 0 else [])]


def read_shard(stored: safe_load.StoredTensor, parameter: DTensor) -> DTensor:
    """Return a stored tensor sharded like ``parameter``, reading only what this rank holds of it."""
    mesh = parameter.device_mesh
    dim = _divided_dim(parameter) if stored.shape == parameter.shape else None
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


def _divided_dim(tensor: DTensor) -> int | None:
    """Return the dimension along which the ranks divide a tensor; None if every rank holds all of it."""
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return None
    if len(tensor.placements) == 1 and isinstance(tensor.placements[0], Shard):
        return tensor.placements[0].dim
    raise NotImplementedError(
        f"A sharded checkpoint holds tensors that are divided in one dimension; got {tensor.placements}."
    )
