"""Findings: what the user must change or check, and how."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from det_lightning.startup_hook import is_accepted


class Severity(str, enum.Enum):
    """How much a finding matters."""

    problem = "problem"  #: does not run on det_lightning
    check = "check"  #: runs, but perhaps not correctly: look at the line
    note = "note"  #: worth knowing; there is nothing to do


class Need(str, enum.Enum):
    """Whether a finding keeps files on the real Determined."""

    nothing = ""  #: no
    script = "script"  #: the file, only where run as a script
    file = "file"  #: the file, and all files that import or start the file


class Premise(str, enum.Enum):
    """What a finding in one file assumes, and the whole project may disprove."""

    nothing = ""
    changed = "changed"  #: the ported file is written
    by_hand = "by hand"  #: no configuration starts the file
    in_trial = "in trial"  #: the file is used beside the context of a trial
    outside_trial = "outside trial"  #: the file is used, but beside no context of a trial
    unneeded = "unneeded"  #: nothing in the project needs Determined


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A piece of work for the user."""

    line: int  # in the file before porting, from 1; 0 for the file as a whole
    severity: Severity
    reason: str  # the code or setting, and why it cannot stay
    advice: str
    needs_determined: Need = Need.nothing
    premise: Premise = Premise.nothing
    needs_gpu: bool = False  # fails on a machine without a GPU


def line_at(text: str, offset: int, first_line: int = 1) -> int:
    """Return the line of ``text[offset]`` in a file; ``first_line`` is the line of the text's beginning."""
    return first_line + text.count("\n", 0, offset)


def drop_resolved(findings: Iterable[Finding], text: str) -> list[Finding]:
    """Return the findings by line, without duplicates and without lines that a comment accepts."""
    lines = ["", *text.splitlines()]
    return [
        finding
        for finding in sorted(set(findings))
        if not (finding.line < len(lines) and is_accepted(lines[finding.line]))
    ]
