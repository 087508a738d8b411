"""The file with the figures of the benchmarks, which has an entry for each commit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.launching import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("run_all")


def entry(commit: str, **figures: float) -> dict[str, Any]:
    return {"commit": commit, "date": "2026-01-01", "figures": figures}


def test_entries_of_a_commit_are_one(run_all: ModuleType, tmp_path: Path) -> None:
    history = [entry("first", one=1.0), entry("second", one=2.0, two=2.0)]
    assert run_all.add_entry(history, entry("second", two=3.0, three=3.0)) == [
        entry("first", one=1.0),
        entry("second", one=2.0, two=3.0, three=3.0),
    ]
    file = tmp_path / "history.json"
    run_all.write_entry(file, entry("first", one=1.0))
    run_all.write_entry(file, entry("first", two=2.0))
    assert json.loads(file.read_text()) == [entry("first", one=1.0, two=2.0)]


def test_history_names_versions() -> None:
    history = json.loads((BENCHMARKS / "history.json").read_text())
    assert history
    for known in history:
        assert known.keys() == {"commit", "date", "machine", "versions", "figures"}
        assert known["versions"].keys() >= {"python", "torch", "pytorch-lightning"}
        assert known["figures"]
