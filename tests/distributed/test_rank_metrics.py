"""Metrics of several ranks are reduced to the bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from det_lightning.core import DistributedContext
from det_lightning.engine.metrics import RankExchange, average_over_ranks, reduce_validation_metrics
from det_lightning.pytorch import Reducer
from det_lightning.pytorch._reducer import simple_reduce
from tests.ranks.ranks import in_processes, on_ranks

pytestmark = pytest.mark.slow

BATCHES = 100
METRICS = 10


def metric_of(kind: int, random: np.random.RandomState) -> Any:
    """Return a number of one of all plain types, whose mean depends on the order in which such are added."""
    value = random.lognormal(0, 8)
    floats = [float(value), np.array(value, np.float32), np.array(value, np.float64), np.float32(value)]
    return [*floats, int(value), np.array(int(value), np.int64), np.array(int(value) % 1000, np.int32)][kind % 7]


def window_of(rank: int) -> list[dict[str, Any]]:
    random = np.random.RandomState(rank)
    return [{f"metric{index}": metric_of(index, random) for index in range(METRICS)} for _ in range(BATCHES)]


def mean_of_gathered(size: int) -> list[dict[str, Any]]:
    """Return what a chief computes that has gathered the windows of all ranks."""
    windows = [window_of(rank) for rank in range(size)]
    return [
        {name: np.mean(np.array([window[index][name] for window in windows])) for name in batch}
        for index, batch in enumerate(windows[0])
    ]


def is_same(found: Any, expected: Any) -> bool:
    """Return whether two numbers are equal to the bit and of the same type."""
    return bool(found.dtype == expected.dtype and found.tobytes() == expected.tobytes())


@pytest.mark.parametrize("size", [2, 8])
def test_report_equals_the_mean_of_gathered(size: int, tmp_path: Path) -> None:
    def report(context: DistributedContext) -> tuple[Any, int]:
        return average_over_ranks(window_of(context.rank), RankExchange(context), 1 << context.rank % 2)

    expected = mean_of_gathered(size)
    for window, flags in in_processes(size, tmp_path, report):
        assert flags == 0b11
        for batch, means in zip(window, expected, strict=True):
            assert all(is_same(batch[name], mean) for name, mean in means.items())
            assert [isinstance(batch[f"metric{index}"], np.ndarray) for index in range(7)] == [0, 1, 1, 0, 0, 1, 1]


REDUCERS = {f"{way.name} {kind}": way for way in Reducer for kind in range(7)}


def validation_of(rank: int, batches: int) -> list[dict[str, Any]]:
    random = np.random.RandomState(100 + rank)
    return [{name: metric_of(int(name[-1]), random) for name in REDUCERS} for _ in range(batches)]


def reduce_of_gathered(size: int, batches: list[int]) -> dict[str, Any]:
    """Return what a chief computes that has gathered what each rank has reduced its batches to."""
    ranks = [validation_of(rank, count) for rank, count in enumerate(batches) if count]
    counts = [count for count in batches if count]
    return {
        name: simple_reduce(way, [simple_reduce(way, np.stack([b[name] for b in rank])) for rank in ranks], counts)
        for name, way in REDUCERS.items()
    }


@pytest.mark.parametrize(("size", "without"), [(2, 0), (2, 1), (8, 0)])
def test_uneven_validation_equals_gathered(size: int, without: int, tmp_path: Path) -> None:
    counts = [3 + rank % 2 for rank in range(size - without)] + [0] * without

    def validate(context: DistributedContext) -> tuple[dict[str, Any], int]:
        batches = validation_of(context.rank, counts[context.rank])
        return reduce_validation_metrics(batches, REDUCERS, RankExchange(context), context.rank & 1)

    expected = reduce_of_gathered(size, counts)
    for metrics, flags in in_processes(size, tmp_path, validate):
        assert flags == 1
        assert list(metrics) == list(expected)
        wrong = {name: (metrics[name], value) for name, value in expected.items() if not is_same(metrics[name], value)}
        assert not wrong


def test_other_metrics_are_gathered(tmp_path: Path) -> None:
    values: list[Any] = [np.array(3.0, np.float16), np.array([1.0, 2.0]), True, 2**80]

    def average(context: DistributedContext) -> list[tuple[float, float]]:
        exchange = RankExchange(context)
        windows = [[{"a": 1.0 + context.rank, "b": value}] for value in values]
        averages = [average_over_ranks(window, exchange, 0)[0][0] for window in windows]
        return [(one["a"], float(one["b"])) for one in averages]

    for found in (on_ranks(1, 2, average), in_processes(2, tmp_path, average)):
        assert found == [[(1.5, float(np.mean(value))) for value in values]] * 2


def test_ranks_with_other_metrics_are_named(tmp_path: Path) -> None:
    def average(context: DistributedContext) -> Any:
        return average_over_ranks([{f"of rank {context.rank}": 1.0}], RankExchange(context), 0)

    for found in (on_ranks(1, 2, average), in_processes(2, tmp_path, average)):
        assert all("1 times ['of rank 0'] on rank 0, and 1 times ['of rank 1'] on rank 1" in str(e) for e in found)


def test_objects_of_any_size_use_the_group(tmp_path: Path) -> None:
    sizes = [10, 0, 2_000_000]

    def exchange_all(context: DistributedContext) -> list[Any]:
        exchange = RankExchange(context)
        found = []
        for size in sizes:
            own = {"rank": context.rank, "bytes": bytes([context.rank]) * size}
            gathered = exchange.allgather(own)
            assert (gathered[0] is own) == (context.rank == 0)
            found.append((gathered, exchange.broadcast(own)))
        return found

    ranks = in_processes(3, tmp_path, exchange_all)
    assert ranks[0] == ranks[1] == ranks[2]
    for size, (gathered, of_chief) in zip(sizes, ranks[0], strict=True):
        assert gathered == [{"rank": rank, "bytes": bytes([rank]) * size} for rank in range(3)]
        assert of_chief == gathered[0]


def test_failed_pickle_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    def exchange_once(context: DistributedContext) -> Any:
        exchange = RankExchange(context)
        exchange.allgather(context.rank)
        try:
            return exchange.allgather(threading.Lock() if context.rank == 1 else 0)
        except BaseException as error:
            context.abandon(error)
            raise

    first, second = in_processes(2, tmp_path, exchange_once)
    assert "rank 1 takes part no more, since it has failed with TypeError: cannot pickle" in str(first)
    assert "cannot pickle" in str(second)


def test_exchange_of_a_run_is_no_exchange_of_the_user(tmp_path: Path) -> None:
    def differ(context: DistributedContext) -> Any:
        exchange = RankExchange(context)
        exchange.allgather(context.rank)
        return exchange.allgather("metrics") if context.rank == 0 else context.allgather("of the user")

    found = in_processes(2, tmp_path, differ)
    assert all("All ranks must call the same" in str(error) for error in found)
