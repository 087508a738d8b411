"""The log of a trial on several nodes: the nodes' logs, each line with its rank or node, copied as they grow.

Only the runner writes the trial's log: on a shared file system, appends of several machines may overwrite each other.
"""

from __future__ import annotations

from pathlib import Path

from det_lightning.core._task import NODES
from det_lightning.files.local_files import write_whole

_LOG = "log.txt"
# The number of bytes of a node's log that are in the trial's log.
_COPIED = "copied.txt"
_MARK = b"[rank="
_MOST_BYTES = 2**24


def copy_node_logs(directory: Path, *, ended: bool) -> None:
    """Append new whole lines of the nodes' logs to the trial's log; once the run has ended, also what is left."""
    for node in sorted(directory.glob(f"{NODES}/*")):
        while _copy_lines(node, directory / _LOG, ended=ended):
            pass


def _copy_lines(node: Path, log: Path, *, ended: bool) -> bool:
    """Append some lines to the log; return whether there were any."""
    note = node / _COPIED
    copied = int(note.read_text()) if note.exists() else 0
    # Opened rather than asked for its size, which a network file system may remember from before.
    try:
        with (node / _LOG).open("rb") as file:
            file.seek(copied)
            new = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return False
    if not new:
        return False
    lines = new[: new.rfind(b"\n") + 1]
    if not lines and (ended or len(new) == _MOST_BYTES):
        lines = new
    # Launchers have marked the lines of ranks.
    mark = f"[node={node.name}] ".encode()
    with log.open("ab") as file:
        for line in lines.removesuffix(b"\n").split(b"\n") if lines else []:
            file.write((b"" if line.startswith(_MARK) else mark) + line + b"\n")
    write_whole(note, str(copied + len(lines)).encode())
    return bool(lines)
