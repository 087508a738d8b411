"""Finding out whether a checkpoint can be relied on."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import (
    FILES_READ,
    LIGHTNING_FILE,
    METADATA_FILE,
    find_state_file,
    read_json,
    require_complete,
)
from det_lightning.checkpoint.format.manifest import MANIFEST_KEY, find_damage, find_unlisted
from det_lightning.checkpoint.format.upgrade import read_load_data
from det_lightning.checkpoint.safe_load.reading import read_resume
from det_lightning.checkpoint.safe_load.state_file import read_state
from det_lightning.checkpoint.safe_load.trial_state_file import read_trial_state

__all__ = ["Verdict", "verify_checkpoint"]


@dataclasses.dataclass
class Verdict:
    """What :func:`verify_checkpoint` found.

    Attributes:
        files: number of files.
        checksums: number of files of which ``metadata.json`` tells the checksum; 0 if Determined wrote the checkpoint.
        problems: what is wrong, a sentence each.
    """

    files: int
    checksums: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def verify_checkpoint(directory: pathlib.Path, *, trusted: bool = False) -> Verdict:
    """Look for all that may be wrong with a checkpoint: missing, changed, damaged and unsafe files.

    Args:
        directory: the checkpoint's, with ``code/`` in it.
        trusted: unpickle anything, running whatever code the files ask for.
    """
    verdict = Verdict(sum(path.is_file() for path in directory.rglob("*")))

    def attempt(check: Callable[[], Any]) -> None:
        try:
            check()
        except errors.CheckpointError as e:
            # A file that several checks read is reported once.
            if str(e) not in verdict.problems:
                verdict.problems.append(str(e))

    attempt(lambda: require_complete(directory))
    attempt(lambda: _compare_checksums(directory, verdict))
    attempt(lambda: read_load_data(directory))
    attempt(lambda: read_trial_state(directory, trusted=trusted))
    # Whether there is a state at all was the first check.
    if (state_file := _state_file(directory)) is not None:
        attempt(lambda: read_state(state_file, trusted=trusted))
    attempt(lambda: read_resume(directory, trusted=trusted))
    if (directory / LIGHTNING_FILE).is_file():
        attempt(lambda: read_state(directory / LIGHTNING_FILE, trusted=trusted))
    return verdict


def _compare_checksums(directory: pathlib.Path, verdict: Verdict) -> None:
    metadata = directory / METADATA_FILE
    if metadata.is_file():
        verdict.problems += find_damage(directory)
        verdict.problems += [
            f"{directory / name} is not listed in {METADATA_FILE}: it was added after the checkpoint was written"
            for name in find_unlisted(directory, FILES_READ)
        ]
        verdict.checksums = len(read_json(metadata).get(MANIFEST_KEY, {}))


def _state_file(directory: pathlib.Path) -> pathlib.Path | None:
    try:
        return find_state_file(directory)
    except errors.CheckpointNotFound:
        return None
