"""Copying the code of a trial into its checkpoints."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import pathspec

from det_lightning.checkpoint.layout import BOOKKEEPING_DIR, CODE_DIR, LOAD_DATA_FILE, METADATA_FILE, STATE_FILES

__all__ = ["copy_code"]

_NEVER_COPIED = [
    "__pycache__/",
    "*.py[co]",
    "*$py.class",
    ".git/",
    ".idea/",
    ".mypy_cache/",
    ".vscode/",
    ".terraform*",
    ".tox/",
    "terraform",
    "terraform_data",
    "terraform.tfstate*",
    "terraform.tfvars*",
    "/shared_fs",
    ".detignore",
]


def copy_code(source: pathlib.Path, target: pathlib.Path, leave_out: pathlib.Path | None = None) -> None:
    """Copy the files of ``source`` to ``target``, less what its ``.detignore`` and a built-in list name.

    Virtual environments are left out too, and so are checkpoints, those of other runs as well: they hold copies
    themselves, and would grow with every one.

    Args:
        source: the directory to copy; ``.detignore`` in it has the syntax of ``.gitignore``.
        target: the directory to make.
        leave_out: a directory that is not copied where it lies in ``source``: the storage of the checkpoints.
    """
    ignored = _ignore_function(source, leave_out and leave_out.resolve(), target.parent.resolve())
    shutil.copytree(source, target, ignore=ignored, ignore_dangling_symlinks=True)
    target.chmod(0o755)


def _ignore_function(
    source: pathlib.Path, leave_out: pathlib.Path | None, being_written: pathlib.Path
) -> Callable[[str, list[str]], set[str]]:
    detignore = source / ".detignore"
    lines = detignore.read_text(encoding="utf-8").splitlines() if detignore.is_file() else []
    spec = pathspec.GitIgnoreSpec.from_lines([*_NEVER_COPIED, *lines])

    def is_ignored(path: pathlib.Path) -> bool:
        relative = path.relative_to(source).as_posix()
        if not path.is_dir():
            return spec.match_file(relative)
        return (
            (path / "pyvenv.cfg").is_file()
            or path.resolve() in (leave_out, being_written)
            or _belongs_to_storage(path)
            or spec.match_file(f"{relative}/")
        )

    return lambda folder, names: {name for name in names if is_ignored(pathlib.Path(folder) / name)}


def _belongs_to_storage(directory: pathlib.Path) -> bool:
    if directory.name == BOOKKEEPING_DIR:
        return True
    described = any((directory / name).is_file() for name in (METADATA_FILE, LOAD_DATA_FILE))
    return described and any((directory / name).exists() for name in (*STATE_FILES, CODE_DIR))
