"""Patterns of log policies are written for Go, and mean the same in Python."""

from __future__ import annotations

import re
import warnings

import pytest

from det_lightning.config import go_patterns


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (".*CUDA out of memory.*", ["RuntimeError: CUDA out of memory. Tried"], ["CUDA error"]),
        ("^[[:alpha:]]+$", ["abc", "XYZ"], ["ab1", "[:alpha:]", "é", ""]),
        ("^[[:^digit:]]+$", ["ab é", "[:"], ["a1"]),
        ("^[^[:space:][:punct:]_]$", ["a", "5"], [" ", "[", "]", "^", "-", "`", "_"]),
        ("^[a[:digit:]-]$", ["a", "7", "-"], ["b", ":", "d"]),
        (r"^[[:xdigit:]\]x]$", ["f", "9", "]", "x"], ["g", "["]),
        ("^[[]$", ["["], ["]"]),
        ("^[]a]$", ["]", "a"], ["["]),
        ("^[^]a]$", ["b"], ["]", "a"]),
        ("^[:alpha:]$", ["a", ":", "l"], ["b"]),
        (r"^\Qa.[b]*\E+$", ["a.[b]*", "a.[b]**"], ["axb"]),
        (r"\Q(", ["("], [")"]),
        (r"\[[[:upper:]]\]", ["[A]"], ["[a]", "A"]),
        (r"error\z", ["an error"], ["error: 1"]),
    ],
)
def test_a_pattern_of_go_matches_what_it_matches_there(pattern: str, matching: list[str], others: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = go_patterns.compiled(pattern)
    assert [text for text in [*matching, *others] if compiled.search(text)] == matching


@pytest.mark.parametrize("pattern", ["[[:letter:]]", "[a", "[[:alpha:]", "(", r"\pL", "[" * 100_000])
def test_what_python_cannot_match_is_no_pattern(pattern: str) -> None:
    with pytest.raises(re.error):
        go_patterns.compiled(pattern)
