"""Code behind a check for a name or a release, which may be meant for other releases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from det_lightning.porting.bypass_rules import parse

# The checks; hasattr and getattr check for the mentioned names only.
_ASKS = re.compile(
    r"(?P<any>__version__|version_info|\bVersion\(|TYPE_CHECKING|ImportError|AttributeError|ModuleNotFoundError)"
    r"|hasattr|getattr",
    re.IGNORECASE,
)


class Guards:
    """The checks in a Python program."""

    def __init__(self, text: str) -> None:
        self._guarded = [*_find_guarded_lines(parse(text))]

    def hold(self, line: int, use: str) -> bool:
        """Return whether a line runs only with releases that have ``use``."""
        words = set(re.findall(r"\w+", use))
        return any(line in lines and (asked is None or not words.isdisjoint(asked)) for lines, asked in self._guarded)


def _find_guarded_lines(tree: ast.Module) -> Iterator[tuple[range, list[str] | None]]:
    """Yield the lines of code behind a check, and the words in the check; None if the check is for any name."""
    for node in ast.walk(tree):
        asked: list[ast.expr | None] = []
        if isinstance(node, ast.Try):
            asked = [handler.type for handler in node.handlers]
        elif isinstance(node, ast.If | ast.IfExp):
            asked = [node.test]
        for test in asked:
            source = ast.unparse(test) if test is not None else ""
            if (found := _ASKS.search(source)) and isinstance(node, ast.stmt | ast.expr):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                yield lines, None if found["any"] else re.findall(r"\w+", source)
