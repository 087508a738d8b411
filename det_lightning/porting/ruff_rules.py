"""Uses ruff to sort imports, and to rename what a few libraries have removed."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from ruff.__main__ import find_ruff_bin

from det_lightning.porting.edits import Edits
from det_lightning.porting.findings import Finding, Premise, Severity
from det_lightning.porting.installed import Guards
from det_lightning.porting.python_syntax import PythonFile

# Names gone from unittest and collections, and from numpy 1.24; from numpy 2.
_RULES = ("UP005", "UP035", "NPY001")
_RULES_OF_NUMPY_2 = ("NPY003", "NPY201")
_READS = re.compile(r"\bnumpy\b|\bunittest\b|\bcollections\b")
_USE = re.compile(r"[^\n,]*")


def may_have_old_names(text: str) -> bool:
    """Return whether Python source is worth asking ruff."""
    return _READS.search(text) is not None


def port_old_names(file: PythonFile) -> None:
    """Apply ruff's safe fixes to names that are gone, and note the other violations; guarded code stays."""
    edits = file.edits
    guards = Guards(edits.text)
    for found in _find_violations(edits.text, [*_RULES, *(_RULES_OF_NUMPY_2 if _has_numpy_2() else ())]):
        line = found["location"]["row"]
        use = _USE.match(edits.text, edits.offset(line, found["location"]["column"] - 1))
        if guards.hold(line, use.group() if use else ""):
            continue
        fix = found["fix"]
        if fix is not None and fix["applicability"] == "safe" and "\f" not in edits.text:
            _apply(edits, fix["edits"])
        else:
            reason, _, advice = found["message"].replace("`", "").rstrip(".").partition(". ")
            file.findings.append(Finding(line, Severity.problem, reason, advice, premise=Premise.changed))


def _apply(edits: Edits, changes: list[dict[str, Any]]) -> None:
    for change in changes:
        start, end = (edits.offset(at["row"], at["column"] - 1) for at in (change["location"], change["end_location"]))
        if edits.text[start:end] != change["content"] and edits.is_free(start, end):
            edits.replace(start, end, change["content"])


@functools.cache
def _has_numpy_2() -> bool:
    """Return whether the project runs with numpy 2 or later: the installed release, or if none is, the newest."""
    try:
        return not importlib.metadata.version("numpy").startswith("1.")
    except importlib.metadata.PackageNotFoundError:
        return True


def _find_violations(text: str, rules: Sequence[str]) -> list[dict[str, Any]]:
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
