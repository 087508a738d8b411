"""Tests beside the real determined: each training runs twice."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of these tests: they need the other side, and importing that alone takes seconds."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.determined)
            item.add_marker(pytest.mark.slow)
