"""Values of the standard library in a state come back as themselves, from state files and from ``.ckpt`` files."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import types
import uuid
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState, load_checkpoint
from det_lightning.checkpoint.format.lightning_file import from_entry, to_entry
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.safe_load import read_state
from tests.checkpoint.made_checkpoints import make_resume

VALUES: dict[str, Any] = {
    "deque": collections.deque([1.0, 2.0], maxlen=5),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "defaultdict without a factory": collections.defaultdict(None, {"a": [1]}),
    "defaultdict of sets": collections.defaultdict(set, {1: {2}}),
    "datetime": datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc),
    "zone": datetime.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "date": datetime.date(2020, 1, 2),
    "time": datetime.time(1, 2, 3, 4),
    "timedelta": datetime.timedelta(days=3, microseconds=1),
    "timezone": datetime.timezone(datetime.timedelta(hours=1), "CET"),
    "path": pathlib.Path("a/b"),
    "pure path": pathlib.PureWindowsPath("c:/a"),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=7),
    "range": range(1, 9, 2),
    "slice": slice(1, None, 2),
    "frozenset": frozenset({1, "a"}),
    "namespace": argparse.Namespace(a=1, b=[2]),
    "simple namespace": types.SimpleNamespace(c=3),
    "nested": [collections.deque([collections.defaultdict(list, x=[pathlib.Path("q"), datetime.timedelta(1)])])],
    "complex": 1j,
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(a=1),
    "bytes": [b"x\xff", bytearray(b"y"), {1}],
}


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("name", VALUES)
def test_value_comes_back_as_itself(name: str, tmp_path: pathlib.Path) -> None:
    save_state({"value": VALUES[name]}, tmp_path / "state.pth")
    assert_same(read_state(tmp_path / "state.pth")["value"], VALUES[name])
    # As Determined reads it.
    assert_same(torch.load(tmp_path / "state.pth", weights_only=False)["value"], VALUES[name])
    # Of a .ckpt file the entry is plain.
    state = {"callbacks": {"c": VALUES[name]}}
    torch.save(to_entry(CheckpointContent(state, TrialState())), tmp_path / "entry")
    read = from_entry(torch.load(tmp_path / "entry", weights_only=True))
    assert_same(read.state["callbacks"]["c"], VALUES[name])
    assert state["callbacks"]["c"] is VALUES[name]


def test_all_files_may_hold_them(tmp_path: pathlib.Path) -> None:
    value = {"c": collections.deque([np.arange(2), torch.ones(2), np.dtype("f4")], maxlen=3)}
    resume = make_resume()
    resume.rng_states = [value]
    content = CheckpointContent({"callbacks": value}, TrialState(), resume=resume, lightning={"callbacks": value})
    (tmp_path / "code").mkdir()
    name = CheckpointStorage(tmp_path / "storage").write(content, code=tmp_path / "code")
    read = load_checkpoint(tmp_path / "storage" / name)
    assert read.resume is not None
    assert read.lightning is not None
    for found in (read.state["callbacks"], read.lightning["callbacks"], read.resume.rng_states[0]):
        assert repr(found) == repr(value)
        assert type(found["c"][0]) is np.ndarray
