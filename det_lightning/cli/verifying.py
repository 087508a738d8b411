"""``det-lightning checkpoint verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from det_lightning.checkpoint.safe_load import Verdict, verify_checkpoint
from det_lightning.cli.finding import find_checkpoints, opened, with_name_of
from det_lightning.cli.output import as_command_line, print_json, print_lines, print_table

__all__ = ["verify_checkpoints"]


def verify_checkpoints(urls: Sequence[str], options: Mapping[str, Any], trusted: bool, as_json: bool) -> bool:
    """Verify checkpoints, and all that are in the storages among ``urls``; return whether all are fine."""
    places = [place for url in urls for place in find_checkpoints(url, options)]
    verdicts: dict[str, Verdict] = {}
    for place in places:
        with opened(place, options, with_code=True) as directory:
            verdict = verify_checkpoint(directory, trusted=trusted)
        problems = [as_command_line(with_name_of(place, directory, problem)) for problem in verdict.problems]
        verdicts[str(place)] = Verdict(verdict.files, verdict.checksums, problems)
    if as_json:
        print_json({"checkpoints": [{"path": path, **_for_json(verdict)} for path, verdict in verdicts.items()]})
    else:
        print_table(
            ["checkpoint", "verdict", ">files", "checksums"],
            [_row(place.name, verdicts[str(place)]) for place in places],
        )
        print_lines(f"PROBLEM: {problem}" for verdict in verdicts.values() for problem in verdict.problems)
    return not any(verdict.problems for verdict in verdicts.values())


def _for_json(verdict: Verdict) -> dict[str, Any]:
    return {"fine": not verdict.problems, **vars(verdict)}


def _row(name: str, verdict: Verdict) -> list[Any]:
    if verdict.problems:
        return [name, "BAD", verdict.files, verdict.checksums or "none"]
    return [name, "fine", verdict.files, verdict.checksums or "none, as Determined writes it"]
