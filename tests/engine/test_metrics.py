"""The metrics of a window: kept as they were when they were returned, converted once, averaged and reduced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import errors
from det_lightning.core import DistributedContext
from det_lightning.engine.metrics import (
    MetricWindow,
    RankExchange,
    average_metrics,
    reduce_validation_metrics,
)
from det_lightning.pytorch import Reducer

floats = st.floats(-1e6, 1e6, width=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_a_tensor_keeps_its_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    window = MetricWindow()
    live = torch.full(shape, 2, dtype=dtype)
    for _ in range(3):
        window.add({"live": live})
        live += 1
    kept = [batch["live"] for batch in window.close()]
    assert all(isinstance(value, np.ndarray) and value.shape == shape for value in kept)
    assert [value.tolist() for value in kept] == [np.full(shape, n).tolist() for n in (2, 3, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_means_can_be_taken_before_the_window_closes(dtype: torch.dtype) -> None:
    window = MetricWindow()
    for batch, expected in [(2, 2.0), (4, 3.0), (9, 5.0)]:
        value = torch.full((), batch, dtype=dtype)
        window.add({"tensor": value, "number": batch, "numpy": np.float32(batch), "none": None, "list": [1]})
        means = {name: (mean.item(), mean.dtype) for name, mean in window.means().items()}
        assert means == dict.fromkeys(("tensor", "number", "numpy"), (expected, torch.float64))
    assert (len(window), len(window.close())) == (3, 3)
    assert (len(window), window.close(), window.means()) == (0, [], {})


@pytest.mark.parametrize("shape", [(), (2,)])
def test_closed_windows_share_no_memory(shape: tuple[int, ...]) -> None:
    window = MetricWindow()
    live = torch.zeros(shape)
    window.add({"a": live, "b": live})
    (batch,) = window.close()
    batch["a"] += 1
    assert not np.any(batch["b"])
    assert not torch.any(live)


def test_all_types_and_shapes_come_together() -> None:
    """Types that are not converted at once on a CPU stand for tensors on a GPU."""
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 2), (0,)]
    narrow = [torch.bfloat16, torch.float16, torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool]
    dtypes = [*narrow, torch.float32, torch.float64, torch.int64, torch.complex64, torch.complex128]
    generator = torch.Generator().manual_seed(0)
    kinds = [(dtype, shape) for dtype in dtypes for shape in shapes]
    window, batches = MetricWindow(), []
    for _ in range(3):
        batches.append({str(kind): torch.randint(0, 100, kind[1], generator=generator).to(kind[0]) for kind in kinds})
        window.add(dict(batches[-1]))
    for expected, converted in zip(batches, window.close(), strict=True):
        for name, tensor in expected.items():
            plain = tensor.float() if tensor.dtype is torch.bfloat16 else tensor  # numpy has no bfloat16
            assert converted[name].dtype == plain.numpy().dtype
            np.testing.assert_array_equal(converted[name], plain.numpy())


@given(st.lists(floats, min_size=1, max_size=200), st.sampled_from([torch.float32, torch.float64, torch.float16]))
def test_averages_are_exactly_numpys(values: list[float], dtype: torch.dtype) -> None:
    tensors = [torch.tensor(value, dtype=torch.float32).clamp(-6e4, 6e4).to(dtype) for value in values]
    window = MetricWindow()
    for tensor in tensors:
        window.add({"loss": tensor})
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.mean(np.array([tensor.numpy() for tensor in tensors])).item()
        average = average_metrics(window.close())["loss"]
    assert average is not None
    assert np.array_equal(average, expected, equal_nan=True)


@pytest.mark.parametrize(
    "values",
    [
        [np.array(0.1, np.float32), np.array(0.2, np.float32)],
        [np.array(0.1, np.float32), np.array(0.2, np.float64)],
        [np.array(2**62, np.int64), np.array(1.5)],
        [np.array([1.0, 2.0]), np.array([3.0, 4.0])],
        [2**63, 1],
        [True, 2.5],
        [np.float32(0.1), 0.1],
        [np.array(1.5, object), np.array(2, object)],
    ],
)
@pytest.mark.parametrize("reducer", Reducer)
def test_mixed_types_reduce_like_numpys_stack(values: list[Any], reducer: Reducer) -> None:
    batches = [{"m": value} for value in values]
    stacked: dict[Reducer, Any] = {Reducer.AVG: np.average, Reducer.SUM: np.sum, Reducer.MAX: np.max}
    expected = stacked.get(reducer, np.min)(np.stack(values))
    reduced, _ = reduce_validation_metrics(batches, reducer, RankExchange(DistributedContext()))
    assert (type(reduced["m"]), reduced["m"]) == (type(expected), expected)


@pytest.mark.parametrize(
    ("metric", "reducer", "error", "message"),
    [
        (1.0, {"m": "mean"}, errors.InvalidExperimentException, r"must return members of .*Reducer; got {'m': 'mean'}"),
        ("a word", Reducer.AVG, TypeError, "Validation metric 'm' cannot be reduced by Reducer.AVG"),
    ],
)
def test_irreducible_metrics_are_named(metric: Any, reducer: Any, error: type[BaseException], message: str) -> None:
    with pytest.raises(error, match=message):
        reduce_validation_metrics([{"m": metric}] * 2, reducer, RankExchange(DistributedContext()))
