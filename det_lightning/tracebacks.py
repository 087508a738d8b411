"""Shortening tracebacks to the user's frames: those of det_lightning and Lightning are left out.

Nothing is left out if the error may be a bug of det_lightning: it then comes from a statement other than ``raise``, and
no code of the user called that statement.
"""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from det_lightning.escaping import get_logger

logger = get_logger(__name__)

_PACKAGE = f"{Path(__file__).parent}/"
# Also the frames that start programs, and those that import modules.
_LEFT_OUT = re.compile(
    rf"{re.escape(_PACKAGE)}|<frozen |.*/importlib/__init__|.*/contextlib\.py"
    r"|.*/site-packages/(det_lightning|pytorch_lightning|lightning|lightning_fabric)/"
)
_INSTALLED = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<frozen ")
_FRAME = re.compile(r'(?:\[\w+\]:)? *File "(.*)", line \d+, in ')
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class _Frame(NamedTuple):
    file: str
    source: str  # the line, without indentation


def _choose_left_out(frames: Sequence[_Frame]) -> set[int]:
    """Return the indices of the frames to leave out."""
    ours = {index for index, frame in enumerate(frames) if _LEFT_OUT.match(frame.file)}
    first = min(ours, default=len(frames))
    called = range(first, len(frames))
    users = [index for index in called if index not in ours and not frames[index].file.startswith(_INSTALLED)]
    if len(frames) - 1 in ours and frames[-1].source.startswith("raise "):
        return ours
    return ours if users else set()


def shorten_traceback(error: BaseException) -> None:
    """Leave out frames of the traceback of an error, after the first, and log all of them with the level DEBUG."""
    entries = list(_walk(error.__traceback__))
    if isinstance(error, _ENDS) or len(entries) < 2:
        return
    head, *rest = entries
    left_out = _choose_left_out([_read_frame(entry) for entry in rest])
    if not left_out:
        return
    logger.debug("The whole traceback:\n%s", "".join(traceback.format_exception(error)))
    for entry in [one for index, one in enumerate(rest) if index not in left_out]:
        head.tb_next, head = entry, entry
    head.tb_next = None
    cause = error.__cause__
    is_said = cause is not None and str(cause) != "" and str(cause) in str(error)
    if cause is not None and is_said and all(map(_is_of_library, _walk(cause.__traceback__))):
        error.__cause__ = None  # which leaves the context suppressed


def _is_of_library(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_INSTALLED) or _LEFT_OUT.match(file) is not None


def shorten_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log, with a line in place of the frames left out of tracebacks."""
    block: list[list[str]] = []
    for line in lines:
        if _FRAME.match(line):
            block.append([line])
        elif block and re.match(r"(\[\w+\]:)? {4}", line):
            block[-1].append(line)
        else:
            yield from _shorten_block(block)
            block = []
            yield line
    yield from _shorten_block(block)


def _shorten_block(block: list[list[str]]) -> Iterator[str]:
    frames = [_Frame(_FRAME.match(lines[0])[1], lines[1].strip() if lines[1:] else "") for lines in block]  # type: ignore[index]
    left_out = _choose_left_out(frames)
    for index, lines in enumerate(block):
        if index not in left_out:
            yield from lines
    if left_out:
        yield f"  ({len(left_out)} frames of libraries are left out)"


def _walk(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _read_frame(entry: TracebackType) -> _Frame:
    file = entry.tb_frame.f_code.co_filename
    return _Frame(file, linecache.getline(file, entry.tb_lineno).strip())
