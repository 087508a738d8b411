"""Two processes that share each batch train like one, but for rounding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

from tests.launching import LAUNCHER, environment

pytestmark = pytest.mark.slow


def train(folder: Path, ranks: int, batches: int, make: str, *latest: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    launcher = LAUNCHER if ranks == 2 else []
    command = [sys.executable, *launcher, *(["--", sys.executable] if launcher else []), "-m", "tests.estimator.ranks"]
    done = subprocess.run(
        [*command, str(folder), str(batches), make, *latest],
        env=environment(TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / f"{ranks}-{batches}.json").read_text())
    return found


@pytest.mark.parametrize("make", ["linear", "deep", "with_metric"])
def test_two_processes_train_as_one(make: str, tmp_path: Path) -> None:
    one = train(tmp_path / "one", 1, 6, make)
    two = train(tmp_path / "two", 2, 6, make)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    names = ["loss", "average_loss", "accuracy", "global_step", *(["largest"] if make == "with_metric" else [])]
    assert [two["validation"][name] for name in names] == pytest.approx(
        [one["validation"][name] for name in names], rel=1e-5
    )


def test_two_processes_resume_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, 6, "linear")
    first = train(tmp_path / "parts", 2, 3, "linear")
    second = train(tmp_path / "parts", 2, 6, "linear", "last")
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["validation"] == whole["validation"]
