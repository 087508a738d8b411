"""Collectives of numpy arrays over the process group; they wait for other ranks as exchanges of objects do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from det_lightning.core._distributed import DistributedContext

Array = np.ndarray[Any, Any]

# Gloo's all-gather passes data around a ring; sending a copy to each rank takes one round, but more memory.
_LARGEST_COPIES_BYTES = 1 << 20


def device_of_group(distributed: DistributedContext) -> torch.device | None:
    """Return the device of the tensors that the process group exchanges; None if these ranks have no usable group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (distributed.rank, distributed.size):
        return None
    backend = dist.get_backend()
    if "gloo" in backend:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None


class GroupCollectives:
    """Collectives that all ranks of a process group call in the same order, with arrays of the same size and type.

    ``device`` is that of :func:`device_of_group`.
    """

    def __init__(self, distributed: DistributedContext, device: torch.device) -> None:
        self.rank = distributed.rank
        self.size = distributed.size
        self._distributed = distributed
        self._device = device

    def all_to_all(self, outgoing: Array, operation: str) -> Array:
        """Send each rank its part of ``outgoing``, in parts of equal length; return the parts from all ranks."""
        sent = torch.from_numpy(outgoing).to(self._device)
        received = torch.empty_like(sent)
        self._distributed.wait_for(dist.all_to_all_single(received, sent, async_op=True), operation)
        return received.cpu().numpy()

    def all_gather(self, own: Array, operation: str) -> Array:
        """Return the vectors of all ranks, as one array of shape ``(ranks, n)``."""
        if own.nbytes * self.size <= _LARGEST_COPIES_BYTES:
            return self.all_to_all(np.tile(own, self.size), operation).reshape(self.size, -1)
        sent = torch.from_numpy(own).to(self._device)
        received = torch.empty((self.size, len(own)), dtype=sent.dtype, device=self._device)
        self._distributed.wait_for(dist.all_gather(list(received.unbind()), sent, async_op=True), operation)
        return received.cpu().numpy()

    def broadcast(self, own: Array, operation: str) -> Array:
        """Return the chief's vector."""
        exchanged = torch.from_numpy(own).to(self._device)
        self._distributed.wait_for(dist.broadcast(exchanged, 0, async_op=True), operation)
        return exchanged.cpu().numpy()
