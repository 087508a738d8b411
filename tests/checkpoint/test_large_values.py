"""Large ordinary values, and values that refer to one another many times, are read as they are."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning.checkpoint.safe_load import read_state

pytestmark = pytest.mark.slow

LAYER = torch.ones(1_000_000)
ORDINARY: dict[str, Any] = {
    "shared": [[np.zeros(10)] * 1000, [b"x" * 1000] * 1000, ["x" * 5000] * 1000],
    "integers": {index: index for index in range(-5000, 5000)},
    "large integers": {2**62 + index: index for index in range(1000)},
    "numbers of numpy": {np.int64(index): index for index in range(5000)},
    "tuples": {(row, np.int32(column)): 1 for row in range(-50, 50) for column in range(-50, 50)},
    "complex": {complex(row, column): 1 for row in range(50) for column in range(50)},
    "floats": {float(index) / 7: 1 for index in range(5000)},
    "bytes": {b"": 1, b"a": 2},
    "nested": [[[[{"a": ({"b": [[1]]},)}]]]],
    "without elements": [b"", bytearray(), np.zeros(0), np.zeros((0, 3)), torch.zeros(0)],
    "sets": [set(range(1000)) for _ in range(2000)],
    "a large set": set(range(10**6, 2 * 10**6)),
    "counters": [collections.Counter(range(1000)) for _ in range(1000)],
    "a layer of many names": [LAYER.view(1000, 1000) for _ in range(100)],
    "a row for many": LAYER.expand(100, -1),
    "expanded": [torch.ones(1).expand(1_000_000) for _ in range(10)],
    "sparse": [torch.eye(1000).to_sparse() for _ in range(10)],
    "quantized": [
        torch.quantize_per_channel(torch.ones(500, 4), torch.ones(500), torch.zeros(500), 0, torch.qint8)
        for _ in range(10)
    ],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_many_ordinary_values_are_read(name: str, tmp_path: Path) -> None:
    torch.save({"value": ORDINARY[name]}, tmp_path / "state.pth")
    assert repr(read_state(tmp_path / "state.pth")["value"]) == repr(ORDINARY[name])
