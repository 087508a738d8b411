"""Making tensors and the states of optimizers those of the chief, over Horovod."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class _Outline:
    """Shape, type and device of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Outline:
        return cls(tensor.shape, tensor.dtype, tensor.is_cpu)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


def share_tensors(hvd: Any, tensors: list[torch.Tensor], name: str) -> None:
    """Overwrite tensors of any shape and type, which all ranks give in the same order, with the chief's."""
    under_way = []
    for number, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        whole = tensor.detach().contiguous()
        # Horovod knows fewer types than torch; bytes are bytes.
        flat = whole.reshape(-1).view(torch.uint8)
        under_way.append((hvd.broadcast_async_(flat, 0, name=f"{name}.{number}"), tensor.detach(), whole))
    for handle, tensor, whole in under_way:
        hvd.synchronize(handle)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def share_state(hvd: Any, optimizer: torch.optim.Optimizer, device: torch.device, name: str) -> None:
    """Make the state and the options of an optimizer those of the chief's.

    Horovod's own function gives an optimizer without a state one by a step with gradients of zero, which changes the
    weights by weight decay. Here a new optimizer stays new.
    """
    state = optimizer.state_dict()
    outlined = {
        index: {key: _Outline.of(value) if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    chiefs: dict[str, Any] = hvd.broadcast_object({**state, "state": outlined}, 0, name=f"{name}.outline")
    if hvd.rank() != 0:
        entries = chiefs["state"].items()
        filled = {
            index: {key: value.empty(device) if isinstance(value, _Outline) else value for key, value in entry.items()}
            for index, entry in entries
        }
        state = {**chiefs, "state": filled}
    tensors = [value for entry in state["state"].values() for value in entry.values()]
    share_tensors(hvd, [value for value in tensors if isinstance(value, torch.Tensor)], name)
    if hvd.rank() != 0:
        optimizer.load_state_dict(state)
