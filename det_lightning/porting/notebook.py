"""Notebooks: the code of their cells, ported as one program."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from det_lightning.porting.commands import port_shell
from det_lightning.porting.findings import Finding, line_at
from det_lightning.porting.python_files import port_python

_END_OF_CELL = "#:::end of cell:::\n"
_MAGIC = re.compile(r"^([ \t]*)([%!?][^\n]*)$", re.MULTILINE)
_HIDDEN = re.compile(r"^([ \t]*)pass  #:::([^\n]*)$", re.MULTILINE)


class NotebookError(ValueError):
    """The file is not a notebook that can be written back as it was."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program writes notebooks: Jupyter, Colab, Kaggle and editors each have their own way."""

    indent: int | str | None
    separators: tuple[str, str]
    escapes: bool
    line_break: str

    def dump(self, notebook: dict[str, Any]) -> str:
        """Return the text of a notebook, without what follows its last brace."""
        text = json.dumps(notebook, indent=self.indent, separators=self.separators, ensure_ascii=self.escapes)
        return text.replace("\n", self.line_break)


_INDENTED: list[tuple[int | str | None, tuple[str, str]]] = [(indent, (",", ": ")) for indent in (1, 2, 4, 3, "\t", 0)]
_INDENTS = [*_INDENTED, (None, (", ", ": ")), (None, (",", ":"))]
_LAYOUTS = [
    Layout(indent, separators, escapes, line_break)
    for (indent, separators), escapes, line_break in itertools.product(_INDENTS, (False, True), ("\n", "\r\n"))
]


def port_notebook(text: str) -> tuple[str, list[Finding]]:
    """Return a notebook with its code cells ported, and findings, whose lines count over the code of all cells."""
    notebook, dump = _read(text)
    cells = _code_cells(notebook)
    sources = ["".join(cell["source"]) for cell in cells]
    # Cells that are run by another program begin with two signs.
    python = [number for number, source in enumerate(sources) if not source.lstrip().startswith("%%")]
    hidden = [_MAGIC.sub(r"\1pass  #:::\2", sources[number]) for number in python]
    program = "".join(source.rstrip("\n") + "\n" + _END_OF_CELL for source in hidden)
    ported, findings = port_python(program)
    line = 1
    for number, source, old in zip(python, ported.split(_END_OF_CELL), hidden, strict=False):
        shown, found = _show_magic(source.removesuffix("\n"), old, line)
        findings += found
        line += old.rstrip("\n").count("\n") + 2
        ending = sources[number][len(sources[number].rstrip("\n")) :]
        _write(cells[number], shown + ending)
    return dump(notebook) + _ending(text), findings


def parts_of(text: str) -> tuple[str, str]:
    """Return the Python of a notebook as one program, and the commands in it, a line each.

    Raises:
        NotebookError: it is not a notebook.
    """
    notebook, _ = _read(text)
    sources = ["".join(cell["source"]) for cell in _code_cells(notebook)]
    python = [source for source in sources if not source.lstrip().startswith("%%")]
    commands = [found.group(2).lstrip("%!") for source in python for found in _MAGIC.finditer(source)]
    return "\n".join(_MAGIC.sub(r"\1pass", source) for source in python), "\n".join(commands)


def _read(text: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], str]]:
    """Return a notebook, and a function that writes it in its current layout."""
    try:
        notebook = json.loads(text)
    except ValueError as e:
        raise NotebookError(f"not JSON: {e}") from e
    if not isinstance(notebook, dict) or not _are_cells(notebook.get("cells")):
        raise NotebookError("not a notebook of version 4")
    body = text[: len(text) - len(_ending(text))]
    for layout in _LAYOUTS:
        # Most are told apart by their first characters, and notebooks may be large.
        if layout.dump({"": 0})[:2] == body[:2] and layout.dump(notebook) == body:
            return notebook, layout.dump
    raise NotebookError("not laid out as any program does, so that it could not be written back as it was")


def _are_cells(cells: Any) -> bool:
    return isinstance(cells, list) and all(
        isinstance(cell, dict) and (cell.get("cell_type") != "code" or _is_source(cell.get("source"))) for cell in cells
    )


def _is_source(source: Any) -> bool:
    return isinstance(source, str) or (isinstance(source, list) and all(isinstance(line, str) for line in source))


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell.get("cell_type") == "code"]


def _ending(text: str) -> str:
    return text[len(text.rstrip("\r\n")) :]


def _show_magic(source: str, before: str, first_line: int) -> tuple[str, list[Finding]]:
    """Return a cell with its commands ported; findings refer to the lines before porting."""
    lines = [line_at(before, found.start(), first_line) for found in _HIDDEN.finditer(before)]
    commands = list(_HIDDEN.finditer(source))
    ported = [port_shell(command.group(2), line) for command, line in zip(commands, lines, strict=False)]
    texts = iter(text for text, _ in ported)
    shown = _HIDDEN.sub(lambda match: match.group(1) + next(texts, match.group(2)), source)
    return shown, [finding for _, findings in ported for finding in findings]


def _write(cell: dict[str, Any], source: str) -> None:
    cell["source"] = source.splitlines(keepends=True) if isinstance(cell["source"], list) else source
