"""Finds the error that ended a program in its output."""

from __future__ import annotations

import re
from pathlib import Path

from det_lightning.escaping import make_safe

_TRACEBACK = "Traceback (most recent call last):"
# Launchers put the rank, or the node, before each line; torchrun's summary puts a name before a traceback.
_RANK = re.compile(r"^\[(?:rank|node)\W?\d+\]:? ?")
_LABEL = re.compile(r"^(\s*)traceback : ")
# torchrun's own error only says that a process failed.
_OF_TORCHRUN = "torch.distributed.elastic."
_MOST_BYTES = 256 * 1024
_MOST_CHARS = 300


def find_error(output: str) -> str:
    """Return the exception of the last traceback in a program's output, else the last line without an indent."""
    lines = [_LABEL.sub(r"\1", _RANK.sub("", line)) for line in output.splitlines() if line.strip()]
    for start in [number for number, line in enumerate(lines) if line.lstrip().startswith(_TRACEBACK)][::-1]:
        indent = _count_spaces(lines[start])
        after = (line.strip() for line in lines[start + 1 :] if _count_spaces(line) <= indent)
        if (found := next(after, _OF_TORCHRUN)) and not found.startswith(_OF_TORCHRUN):
            return make_safe(found)[:_MOST_CHARS]
    last = next((line for line in reversed(lines) if not line[0].isspace()), "")
    return make_safe(last.strip())[:_MOST_CHARS]


def read_end(log: Path, start: int = 0) -> str:
    """Return the end of a log that was written after its first ``start`` bytes; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - _MOST_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _count_spaces(line: str) -> int:
    return len(line) - len(line.lstrip())
