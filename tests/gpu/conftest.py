"""Tests that need a CUDA device; where there is none they are skipped, and the end of the report says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    """Skip where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/gpu" in report.nodeid]
    if skipped and not torch.cuda.is_available():
        terminalreporter.section("NOT RUN: GPU", sep="#", red=True)
        terminalreporter.line(f"{len(skipped)} tests need a CUDA device, and there is none here. Run: pytest tests/gpu")
