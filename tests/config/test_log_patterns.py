"""Patterns of log policies are written for Go: those that Python reads otherwise are refused."""

from __future__ import annotations

import re

import pytest

from det_lightning.config.experiment import compile_log_pattern


def test_a_common_pattern_matches() -> None:
    pattern = compile_log_pattern(".*CUDA out of memory.*")
    assert pattern.search("RuntimeError: CUDA out of memory. Tried")
    assert not pattern.search("CUDA error")


@pytest.mark.parametrize("pattern", ["[[:alpha:]]", "[^[:^digit:]]", r"\Qa.b\E", r"\pL", "[a", "(", "[" * 2_000])
def test_syntax_of_go_is_refused(pattern: str) -> None:
    with pytest.raises(re.error):
        compile_log_pattern(pattern)
