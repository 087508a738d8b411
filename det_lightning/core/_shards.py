"""The contributions of several ranks to a checkpoint: files and metadata, and conflicts between ranks."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import METADATA_FILE, digest_file, leads_out
from det_lightning.checkpoint.storage.location import Location, download, explain_errors, upload
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.escaping import get_logger
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)

Selector = Callable[[str], bool]


def list_files(directory: pathlib.Path, selector: Selector | None = None) -> list[str]:
    """Return the sorted relative paths of files and directories in a directory; directories end in ``/``.

    Links are followed. A ``selector`` returns whether to keep a path. Raise a NotADirectoryError or FileNotFoundError
    if there is no directory.
    """
    if not directory.is_dir():
        if directory.exists():
            raise NotADirectoryError(f"{directory} is not a directory.")
        raise FileNotFoundError(f"There is no directory {directory}.")
    return sorted(name for name in _yield_names(directory, ()) if selector is None or selector(name))


def _yield_names(directory: pathlib.Path, above: tuple[pathlib.Path, ...]) -> Iterator[str]:
    """Yield the paths in a directory; a link to one of the directories ``above`` is yielded but not followed."""
    chain = (*above, directory.resolve())
    for path in directory.iterdir():
        if not path.is_dir():
            yield path.name
            continue
        yield f"{path.name}/"
        if path.resolve() not in chain:
            yield from (f"{path.name}/{name}" for name in _yield_names(path, chain))


def select_files(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("/")]


def list_stored(checkpoint: Location) -> list[str]:
    """Return the paths of a checkpoint's files and directories; directories end in ``/``.

    A link to a directory may lead anywhere, and counts as an empty directory.
    """
    if checkpoint.is_local:
        root = checkpoint.local_path
        return sorted(path.relative_to(root).as_posix() + "/" * path.is_dir() for path in root.rglob("*"))
    found = set(checkpoint.find_files())
    for name in list(found):
        found.update(f"{parent}/" for parent in pathlib.PurePosixPath(name).parents if str(parent) != ".")
    return sorted(found)


def _find_conflicts(of_ranks: list[list[str]]) -> dict[str, list[int]]:
    """Return the files that several ranks have, with the ranks; a directory of the same name counts."""
    having: dict[str, list[int]] = {}
    for rank, names in enumerate(of_ranks):
        for name in names:
            having.setdefault(name.rstrip("/"), []).append(rank)
    files = {name for names in of_ranks for name in select_files(names)}
    return {name: ranks for name, ranks in having.items() if name in files and len(ranks) > 1}


def merge_metadata(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the metadata of all ranks; a RuntimeError names keys with different values, and the ranks.

    Dicts under the same key are merged.
    """
    having: dict[str, list[int]] = {}
    conflicts: dict[str, list[int]] = {}

    def add(merged: dict[str, Any], added: Mapping[str, Any], rank: int, path: str) -> None:
        for key, value in added.items():
            name = f"{path}/{key}"
            having.setdefault(name, []).append(rank)
            if isinstance(value, dict) and isinstance(merged.get(key, {}), dict):
                add(merged.setdefault(key, {}), value, rank, name)
            elif key not in merged:
                merged[key] = value
            elif merged[key] != value:
                conflicts[name] = list(having[name])

    merged: dict[str, Any] = {}
    for rank, metadata in enumerate(of_ranks):
        add(merged, metadata, rank, "")
    if conflicts:
        raise RuntimeError(_describe_conflicts("metadata", conflicts))
    return merged


def _describe_conflicts(what: str, conflicts: Mapping[str, list[int]]) -> str:
    lines = [f"    {name}: ranks {', '.join(map(str, ranks))}" for name, ranks in sorted(conflicts.items())]
    return "\n".join([f"The ranks contribute different {what} to a checkpoint, so no checkpoint is written:", *lines])


def choose_share(ranks: DistributedContext, directory: pathlib.Path | None, selector: Selector | None) -> list[str]:
    """Return this rank's share of the files in a directory; no two ranks contribute the same file."""
    identity = None
    if directory is not None:
        found = directory.stat()
        identity = (ranks.cross_rank, found.st_dev, found.st_ino)
    identities = ranks.allgather(identity)
    if set(identities) == {None}:
        raise RuntimeError("upload(ckpt_dir=None, shard=True) was called by all ranks; at least one needs a directory.")
    names: list[str] = []
    # Ranks may share a directory. The first rank contributes all files, or with a selector each rank a part.
    if directory is not None and (selector is not None or identities.index(identity) == ranks.rank):
        names = [name for name in list_files(directory, selector) if name != METADATA_FILE]
    conflicts = _find_conflicts(ranks.allgather(names))
    own = {} if directory is None else {name: directory / name for name in conflicts if ranks.rank in conflicts[name]}
    digests = ranks.allgather({name: "directory" if path.is_dir() else digest_file(path) for name, path in own.items()})
    different = {name: having for name, having in conflicts.items() if len({digests[r][name] for r in having}) > 1}
    if different:
        raise RuntimeError(_describe_conflicts("files", different))
    return [name for name in names if name not in conflicts or conflicts[name][0] == ranks.rank]


def put(directory: pathlib.Path, names: list[str], target: Location) -> None:
    """Copy files of a directory into a new checkpoint."""
    if target.is_local:
        _copy(directory, names, target.local_path)
    else:
        upload(directory, select_files(names), target)


def fetch(source: Location, names: list[str], directory: pathlib.Path) -> None:
    """Copy files and directories of a checkpoint into a directory, created if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    if source.is_local:
        names = [name for name in names if not _leads_out(source.local_path, name)]
        with explain_errors("reading", source):
            _copy(source.local_path, names, directory)
    else:
        download(source, names, directory)


def _leads_out(checkpoint: pathlib.Path, name: str) -> bool:
    """Return whether a file or directory is a link to a target outside of the checkpoint, with a warning."""
    if is_outside := leads_out(checkpoint, checkpoint / name):
        logger.warning("%s is a link that leads out of the checkpoint, and is not copied.", checkpoint / name)
    return is_outside


def _copy(source: pathlib.Path, names: list[str], target: pathlib.Path) -> None:
    """Copy files with permissions and times, and create directories; names of directories end in ``/``."""
    for name in names:
        copy = target / name
        if name.endswith("/"):
            copy.mkdir(parents=True, exist_ok=True)
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, copy)


@contextlib.contextmanager
def share_directory(
    ranks: DistributedContext, staging: StagingDirectory | None, target: Location
) -> Iterator[pathlib.Path]:
    """Yield the directory of a new checkpoint, shared by the ranks of a machine."""
    if target.is_local:
        target.local_path.mkdir(parents=True, exist_ok=True)
        yield target.local_path
        return
    with contextlib.ExitStack() as stack:
        own = None if staging is None else staging.directory
        if own is None and ranks.local_rank == 0:
            own = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        yield ranks.broadcast_local(own)


def run_on_local_chief(ranks: DistributedContext, action: Callable[[], Any]) -> Any:
    """Run ``action`` on the first rank of a machine; return the result, or raise the error, on every rank there."""
    outcome = None
    if ranks.local_rank == 0:
        try:
            outcome = action()
        except (errors.CheckpointError, OSError) as error:
            outcome = error
    outcome = ranks.broadcast_local(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@contextlib.contextmanager
def fail_together(ranks: DistributedContext) -> Iterator[None]:
    """Raise on every rank if the block raises on any."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):
            ranks.allgather(f"{type(error).__name__}: {error}")
        raise
    failed = {rank: message for rank, message in enumerate(ranks.allgather(None)) if message is not None}
    if failed:
        described = "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
        raise RuntimeError(f"The checkpoint is not written, because other ranks have failed: {described}")
