"""The metrics of a window are averaged over the ranks to the bit, and no rank's traffic grows with their number."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from det_lightning.core import DistributedContext
from det_lightning.engine.metrics import average_over_ranks
from tests.core.ranks import free_port, numbers, on_ranks

BATCHES = 100
METRICS = 10


class CountedCollectives(TorchDispatchMode):
    """Notes the collectives inside, and the bytes that each takes from this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            (tensor,) = [one for one in args[1:2] if isinstance(one, torch.Tensor)]
            self.sent.append(tensor.nbytes)
        return func(*args, **(kwargs or {}))


def window_of(rank: int) -> list[dict[str, Any]]:
    """Return metrics of all plain types, whose mean depends on the order in which they are added."""
    random = np.random.RandomState(rank)
    return [
        {
            f"metric{index}": np.array(random.lognormal(0, 8), (np.float32, np.float64)[index % 2])
            if index
            else float(random.lognormal(0, 8))
            for index in range(METRICS)
        }
        for _ in range(BATCHES)
    ]


def mean_of_gathered(size: int) -> list[dict[str, Any]]:
    """Return what a chief computes that has gathered the windows of all ranks."""
    windows = [window_of(rank) for rank in range(size)]
    return [
        {name: np.mean(np.array([window[index][name] for window in windows])) for name in batch}
        for index, batch in enumerate(windows[0])
    ]


def _average(rank: int, size: int, folder: Path, port: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=rank, world_size=size)
    context = DistributedContext(**numbers(rank, 1, size), pub_port=port)
    with CountedCollectives() as counted:
        found = average_over_ranks(window_of(rank), context)
    results.put((rank, found, counted.sent))
    results.close()
    results.join_thread()
    context.close()
    dist.destroy_process_group()


def average_in_processes(size: int, folder: Path) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return of each rank the averaged window, and the bytes that went into each collective."""
    forking = multiprocessing.get_context("fork")
    results = forking.Queue()
    with CountedCollectives():
        torch.zeros(1).clone()  # imports hundreds of modules, which each process would import
    port = free_port()
    ranks = [forking.Process(target=_average, args=(rank, size, folder, port, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    found = sorted((results.get(timeout=300) for _ in ranks), key=lambda one: one[0])
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * size
    return [(window, sent) for _, window, sent in found]


@pytest.mark.parametrize("size", [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_report_takes_two_collectives_and_the_same_bytes_on_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    expected = mean_of_gathered(size)
    for window, sent in average_in_processes(size, tmp_path):
        assert all(
            type(batch[name]) is type(np.array(0.0) if name != "metric0" else np.float64(0))
            and batch[name].dtype == value.dtype
            and batch[name].tobytes() == value.tobytes()
            for batch, means in zip(window, expected, strict=True)
            for name, value in means.items()
        )
        shares = -(-BATCHES * METRICS // size) * size
        assert sent == [8 * shares, 8 * shares]


@pytest.mark.parametrize("value", [np.array(3), np.array([1.0, 2.0]), 7])
def test_metrics_that_are_not_plain_numbers_are_gathered(value: Any) -> None:
    found = on_ranks(1, 2, lambda context: average_over_ranks([{"a": 1.0 + context.rank, "b": value}], context))
    assert [(one[0]["a"], float(one[0]["b"])) for one in found] == [(1.5, float(np.mean(value)))] * 2
