"""Means over the ranks by tensor collectives, equal to the bit with those of values that one rank has gathered.

An all-reduce adds in an order of its own, which changes the last bit. So each rank gets the values of all ranks for its
share of the vector, takes the means in the order of the ranks, and sends them to all: of a vector of ``n`` bytes each
rank sends and receives ``2 n`` in two rounds, however many ranks there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from det_lightning.core._distributed import DistributedContext


def means_device(distributed: DistributedContext) -> torch.device | None:
    """Return the device of tensors that the process group exchanges; None if there is no group of these ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (distributed.rank, distributed.size):
        return None
    backend = dist.get_backend()
    if "gloo" in backend:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None


def mean_over_ranks(
    values: np.ndarray[Any, Any], is_single: np.ndarray[Any, Any], device: torch.device
) -> np.ndarray[Any, Any]:
    """Return the mean of each value over the ranks; all of them must call this.

    Args:
        values: float64, shape ``(n,)``, the same on all ranks.
        is_single: bool, shape ``(n,)``: which of them are float32, and have a mean of that type.
        device: see :func:`means_device`.
    """
    size = dist.get_world_size()
    share = -(-len(values) // size)
    padded = np.zeros(share * size)
    padded[: len(values)] = values
    of_ranks = _exchange(padded, device).reshape(size, share)
    first = dist.get_rank() * share
    singles = np.zeros(share * size, bool)
    singles[: len(values)] = is_single
    # One by one: numpy adds the rows of a matrix in another order than the numbers of a vector.
    means = [
        np.mean(column.astype(np.float32) if single else column)
        for column, single in zip(np.ascontiguousarray(of_ranks.T), singles[first : first + share], strict=True)
    ]
    return _exchange(np.tile(np.array(means, np.float64), size), device)[: len(values)]


def _exchange(outgoing: np.ndarray[Any, Any], device: torch.device) -> np.ndarray[Any, Any]:
    """Send an equal part to each rank; return the parts that came from each."""
    sent = torch.from_numpy(outgoing).to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.cpu().numpy()
