"""ruff's findings and fixes in Python source."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from ruff.__main__ import find_ruff_bin

#: Names gone from numpy 1.24; from numpy 2; from unittest and collections.
OF_NUMPY_1 = ("NPY001",)
OF_NUMPY_2 = ("NPY003", "NPY201")
OF_PYTHON = ("UP005", "UP035")


def find_violations(text: str, rules: Sequence[str]) -> list[dict[str, Any]]:
    """Return the violations of ``rules`` as in ruff's JSON; the list is empty for text other than Python."""
    # For an old release UP035 reports removed names only, not old names beside new ones.
    reported = _run(text, "--select", ",".join(rules), "--target-version", "py37", "--output-format", "json")
    found: list[dict[str, Any]] = json.loads(reported)
    return [one for one in found if one["code"] in rules]


def sort_imports(text: str) -> str:
    """Return Python source with sorted imports."""
    return _run(text, "--select", "I", "--fix-only", "--quiet")


def _run(text: str, *options: str) -> str:
    command = [find_ruff_bin(), "check", "--isolated", "--no-cache", "--exit-zero", "--ignore-noqa", *options]
    command += ["--stdin-filename", "module.py", "-"]
    done = subprocess.run(command, input=text.encode("utf-8", "surrogatepass"), capture_output=True, check=True)
    return done.stdout.decode("utf-8", "surrogatepass")
