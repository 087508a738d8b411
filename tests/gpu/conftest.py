"""Tests on a CUDA device. Without one they are skipped, and the end of the report says so."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

# cuBLAS reads this variable once, when a process first multiplies matrices.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def needs_gpu(request: pytest.FixtureRequest) -> None:
    """Skip a test that is marked ``gpu`` where there is no CUDA device."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for lack of a device, and how to run them."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/gpu" in report.nodeid]
    if skipped and not torch.cuda.is_available():
        terminalreporter.section("NOT RUN: GPU", sep="#", red=True)
        terminalreporter.line(f"{len(skipped)} tests need a CUDA device, and a run of their own: pytest tests/gpu")
