"""Copies of a state, for writing while the state changes."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch

from det_lightning.checkpoint.format.standard_values import list_slots

_State = TypeVar("_State")
# Memory for the copy of a storage: its size in bytes, and whether it is pinned.
_Kind = tuple[int, bool]


class Snapshotter:
    """Copies states to main memory, each over the previous copy; a copy is valid until the next.

    New memory costs as much time as writing the state to a disk's cache, and reused memory a tenth.
    """

    def __init__(self) -> None:
        self._free: dict[_Kind, list[torch.Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copying: list[torch.cuda.Event] = []

    def reserving(self, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Return a function that allocates memory for a copy of ``tensors``, in any thread, before :meth:`copy`.

        The first copy is then as fast as later copies.
        """
        storages = {
            _identify_memory(tensor): _classify_storage(tensor.untyped_storage())
            for tensor in tensors
            if _is_plain(tensor)
        }

        def allocate() -> None:
            # If there is too little memory, the copy will fail and say so.
            with contextlib.suppress(RuntimeError):
                for kind in storages.values():
                    self._free[kind].append(_memory(kind).zero_())

        return allocate

    def copy(self, state: _State, leave: Iterable[torch.Tensor] = ()) -> _State:
        """Return a copy of ``state``: nested containers, tensors on any device, and anything that can be deep-copied.

        Tensors that share memory also share memory in the copy, except sparse, quantized and lazily conjugated tensors
        and tensors of other classes. The tensors in ``leave`` are not copied.

        Copies from a GPU run on a separate stream. Later work on the GPU waits for the copies, but the host does not:
        call :meth:`wait_for_device` before reading a copy.
        """
        self.wait_for_device()  # the memory is about to be reused
        used: dict[torch.device, torch.cuda.Stream] = {}
        free = self._free
        self._free = defaultdict(list)
        storages: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        # deepcopy() takes the copies of tensors from here.
        memo: dict[int, Any] = {id(tensor): tensor for tensor in leave}
        for tensor in iterate_tensors(state):
            if id(tensor) in memo:
                continue
            if not _is_plain(tensor):
                memo[id(tensor)] = copy.deepcopy(tensor) if tensor.is_leaf else tensor.detach().clone().requires_grad_()
                continue
            key = _identify_memory(tensor)
            if key not in storages:
                storages[key] = self._copy_storage(tensor.untyped_storage(), free, used)
            target = torch.empty(0, dtype=tensor.dtype).set_(
                storages[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            is_parameter = type(tensor) is torch.nn.Parameter
            memo[id(tensor)] = torch.nn.Parameter(target, False) if is_parameter else target
            memo[id(tensor)].requires_grad_(tensor.requires_grad)
        for device, stream in used.items():
            self._copying.append(stream.record_event())
            torch.cuda.current_stream(device).wait_event(self._copying[-1])  # before training changes the weights
        return copy.deepcopy(state, memo)

    def wait_for_device(self) -> None:
        """Wait until the copies from GPUs are complete."""
        while self._copying:
            self._copying.pop().synchronize()

    def _copy_storage(
        self,
        source: torch.UntypedStorage,
        free: dict[_Kind, list[torch.Tensor]],
        used: dict[torch.device, torch.cuda.Stream],
    ) -> torch.Tensor:
        kind = _classify_storage(source)
        target = free[kind].pop() if free[kind] else _memory(kind)
        raw = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
        if source.device.type == "cuda":
            if source.device not in used:
                used[source.device] = self._stream_beside(source.device)
            with torch.cuda.stream(used[source.device]):
                target.copy_(raw, non_blocking=True)
        else:
            target.copy_(raw)
        self._free[kind].append(target)
        return target

    def _stream_beside(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream whose work starts after all present work of the device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def _classify_storage(storage: torch.UntypedStorage) -> _Kind:
    # Only copies into pinned memory are asynchronous.
    return storage.nbytes(), storage.device.type != "cpu"


def _memory(kind: _Kind) -> torch.Tensor:
    nbytes, pinned = kind
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def _identify_memory(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return a key of a tensor's memory; several memories may start at the same address, as numpy's views do."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and attributes, as of a checkpoint's content."""
    seen: set[int] = set()
    left = [value]
    for one in left:  # more is appended meanwhile
        if isinstance(one, torch.Tensor):
            yield one
        elif not isinstance(one, (int, float, str)) and id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, dict):
                left += one.values()
            elif isinstance(one, list | tuple | set | frozenset | deque):
                left += one
            if isinstance(attributes := getattr(one, "__dict__", None), dict) and not isinstance(one, ModuleType):
                left.append(attributes)
            left += [getattr(one, name, None) for name in list_slots(type(one))]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has nothing beyond type, size, stride and memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not vars(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > 0
    )
