"""Copies the code of an experiment, so that later edits do not affect later trials."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pathspec

from det_lightning import errors
from det_lightning.checkpoint.format.code_copy import MOST_BYTES, NEVER_COPIED
from det_lightning.experiments.directory import is_experiment


def copy_model_context(source: Path, target: Path) -> None:
    """Copy a directory of code without experiments and the files in ``.detignore``, read like a ``.gitignore``.

    Links are replaced with copies of their targets. If the code is larger than Determined accepts, raise an
    ExperimentError that names the largest files.
    """
    files = list(_list_files(source))
    sizes = {file: (source / file).stat().st_size for file in files}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda file: -sizes[file])[:5]
        listed = ", ".join(f"{file} ({_mib(sizes[file])})" for file in largest)
        raise errors.ExperimentError(
            f"{source} holds {_mib(total)}; an experiment takes {_mib(MOST_BYTES)} at most. List files that the trials "
            f"do not need in {source / '.detignore'}. The largest files are {listed}."
        )
    target.mkdir(parents=True)
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / file, target / file)


def _list_files(source: Path) -> Iterator[str]:
    """Yield the paths of the code's files, relative to ``source``."""
    patterns = list(NEVER_COPIED)
    if (source / ".detignore").is_file():
        patterns += (source / ".detignore").read_text(encoding="utf-8-sig").splitlines()
    ignored = pathspec.GitIgnoreSpec.from_lines(patterns)
    visited: set[str] = set()
    for folder, folders, names in os.walk(source, followlinks=True):
        # A link to a parent directory would be followed forever.
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        relative = Path(folder).relative_to(source)
        folders[:] = sorted(
            name
            for name in folders
            if not ignored.match_file(f"{(relative / name).as_posix()}/") and not is_experiment(Path(folder, name))
        )
        for name in sorted(names):
            path = (relative / name).as_posix()
            if not ignored.match_file(path) and (source / path).is_file():
                yield path


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:.1f} MiB"
