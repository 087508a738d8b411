"""Writing a checkpoint directory."""

from __future__ import annotations

import contextlib
import json
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pathspec
import torch

from det_lightning import errors
from det_lightning.checkpoint import format as layout
from det_lightning.checkpoint.state import TrialState
from det_lightning.checkpoint.storage import CheckpointStorage

__all__ = ["CheckpointWriter", "copy_code"]

# The release whose format is written.
_FORMAT_VERSION = "0.38.1"

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


class CheckpointWriter:
    """Writes checkpoints of one run into a storage.

    Args:
        storage: where to.
        code_dir: the directory whose files are copied to ``code/``, less what its ``.detignore`` names.
    """

    def __init__(self, storage: CheckpointStorage, code_dir: pathlib.Path | None = None) -> None:
        self.storage = storage
        self.code_dir = code_dir or pathlib.Path()

    @contextlib.contextmanager
    def write(
        self,
        state: dict[str, Any],
        trial_state: TrialState,
        load_data: dict[str, Any],
        resume: dict[str, Any],
    ) -> Iterator[tuple[str, pathlib.Path]]:
        """Write a checkpoint; a context manager that yields its id and directory when all but one file is there.

        The last file, which makes the checkpoint a complete one, is written on leaving. If anything fails the
        directory is removed, and earlier checkpoints stay as they are.

        Args:
            state: the content of ``state_dict.pth``.
            trial_state: how far the trial has come.
            load_data: how to build the trial again.
            resume: what an exact resume needs beyond Determined's format.

        Raises:
            CheckpointError: the files can not be written.
        """
        try:
            checkpoint_id, directory = self.storage.new()
        except OSError as e:
            raise errors.CheckpointError(f"No checkpoint can be written below {self.storage.root}: {e}") from e
        try:
            with _writing_to(directory):
                copy_code(self.code_dir, directory / layout.CODE_DIR, leave_out=self.storage.root)
                torch.save(state, directory / layout.STATE_FILE)
                torch.save(resume, directory / layout.RESUME_FILE)
                (directory / layout.TRIAL_STATE_FILE).write_bytes(pickle.dumps(vars(trial_state)))
                _write_json(directory / layout.LOAD_DATA_FILE, load_data)
            yield checkpoint_id, directory
            with _writing_to(directory):
                _write_json(directory / layout.METADATA_FILE, _metadata(trial_state.batches_trained))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


@contextlib.contextmanager
def _writing_to(directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
        raise errors.CheckpointError(f"Checkpoint {directory} can not be written: {e}") from e


def _metadata(steps_completed: int) -> dict[str, Any]:
    return {
        "determined_version": _FORMAT_VERSION,
        "steps_completed": steps_completed,
        "framework": f"torch-{torch.__version__}",
        "format": "pickle",
    }


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, default=str), encoding="utf-8")


def copy_code(source: pathlib.Path, target: pathlib.Path, leave_out: pathlib.Path) -> None:
    """Copy the files of ``source`` to ``target``, less what its ``.detignore`` and a built-in list name.

    Virtual environments are left out too.

    Args:
        source: the directory to copy; ``.detignore`` in it has the syntax of ``.gitignore``.
        target: the directory to make.
        leave_out: a directory that is not copied where it lies in ``source``: the checkpoints themselves.
    """
    ignored = _ignore_function(source, leave_out.resolve())
    shutil.copytree(source, target, ignore=ignored, ignore_dangling_symlinks=True)
    target.chmod(0o755)


def _ignore_function(source: pathlib.Path, leave_out: pathlib.Path) -> Callable[[str, list[str]], set[str]]:
    detignore = source / ".detignore"
    lines = detignore.read_text(encoding="utf-8").splitlines() if detignore.is_file() else []
    spec = pathspec.GitIgnoreSpec.from_lines([*_NEVER_COPIED, *lines])

    def is_ignored(path: pathlib.Path) -> bool:
        relative = path.relative_to(source).as_posix()
        if path.is_dir():
            is_environment = (path / "pyvenv.cfg").is_file()
            return is_environment or path.resolve() == leave_out or spec.match_file(f"{relative}/")
        return spec.match_file(relative)

    return lambda folder, names: {name for name in names if is_ignored(pathlib.Path(folder) / name)}
