"""Code behind a check for a name, a release or a GPU; such code may be written for other releases."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.python_syntax import PythonFile

# The checks; hasattr and getattr check for the mentioned names only.
_ASKS = re.compile(
    r"(?P<any>__version__|version_info|\bVersion\(|TYPE_CHECKING|ImportError|AttributeError|ModuleNotFoundError)"
    r"|(?P<gpu>cuda|gpu)|hasattr|getattr",
    re.IGNORECASE,
)


class Guards:
    """The questions of a Python file."""

    def __init__(self, file: PythonFile) -> None:
        self._file = file
        self._guarded = [*_find_guarded_lines(file)]

    def find_use(self, node: cst.CSTNode) -> str:
        """Return the source of the name or import around a node; for a keyword, the source of the called name."""
        around = cst.Attribute | cst.ImportAlias | cst.ImportFrom
        outer: cst.CSTNode | None = node
        while outer is not None:
            node = outer
            outer = self._file.parent(node)
            if isinstance(outer, cst.Arg) and outer.keyword is node:
                outer = self._file.parent(outer)
            elif not isinstance(outer, around):
                break
        return self._file.source(node)

    def hold(self, line: int, use: str, needs_gpu: bool = False) -> bool:
        """Return whether a line only runs with releases where ``use`` exists, or on a machine with a GPU."""
        words = set(re.findall(r"\w+", use))
        return any(
            line in lines
            and (needs_gpu or not asks["gpu"])
            and (asks.lastgroup or not words.isdisjoint(re.findall(r"\w+", asks.string)))
            for lines, asks in self._guarded
        )


def _find_guarded_lines(file: PythonFile) -> Iterator[tuple[range, re.Match[str]]]:
    """Yield the lines of code behind a check, and the match of the check."""
    for node in file.find(cst.Try):
        for handler in node.handlers:
            if handler.type is not None and (found := _ASKS.search(file.source(handler.type))):
                yield range(file.line(node), file.end_line(node) + 1), found
    for choice in file.find(cst.If, cst.IfExp):
        if found := _ASKS.search(file.source(choice.test)):
            yield range(file.line(choice), file.end_line(choice) + 1), found
