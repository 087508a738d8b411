"""Findings about parts of Determined that det_lightning does not have."""

from __future__ import annotations

from det_lightning import parts_of_determined
from det_lightning.porting.counterparts import counterpart
from det_lightning.porting.findings import Finding, Need, Severity


def missing_part(path: str) -> str:
    """Return the shortest prefix of ``path`` that det_lightning does not have."""
    parts = path.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next((prefix for prefix in prefixes if counterpart(prefix) is None), path)


def missing(path: str, line: int, need: Need = Need.file) -> Finding:
    """Return the finding for a use of ``path``, a dotted name of Determined that det_lightning does not have."""
    part = parts_of_determined.missing_part(path)
    return Finding(line, Severity.problem, f"{part.path}: {part.reason}", part.advice, need)


def has_own_advice(path: str, use: str) -> bool:
    """Return whether there is other advice for ``use``, which begins with ``path``, than for all of ``path``."""
    return parts_of_determined.topic_of(path) != parts_of_determined.topic_of(use)
