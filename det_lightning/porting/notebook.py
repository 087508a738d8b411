"""Notebooks: the code of their cells, ported as one program."""

from __future__ import annotations

import json
import re
from typing import Any

from det_lightning.porting.commands import port_shell
from det_lightning.porting.findings import Finding, line_at
from det_lightning.porting.python_files import port_python

_END_OF_CELL = "#:::end of cell:::\n"
_MAGIC = re.compile(r"^([ \t]*)([%!?][^\n]*)$", re.MULTILINE)
_HIDDEN = re.compile(r"^([ \t]*)pass  #:::([^\n]*)$", re.MULTILINE)


class NotebookError(ValueError):
    """The file is not a notebook that can be written back as it was."""


def port_notebook(text: str) -> tuple[str, list[Finding]]:
    """Return a notebook with its code cells ported, and findings, whose lines count over the code of all cells."""
    notebook, indent = _read(text)
    cells = [cell for cell in notebook.get("cells", []) if cell.get("cell_type") == "code"]
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
    return _dump(notebook, indent) + _ending(text), findings


def parts_of(text: str) -> tuple[str, str]:
    """Return the Python of a notebook as one program, and the commands in it, a line each.

    Raises:
        NotebookError: it is none.
    """
    notebook, _ = _read(text)
    sources = ["".join(cell["source"]) for cell in notebook.get("cells", []) if cell.get("cell_type") == "code"]
    python = [source for source in sources if not source.lstrip().startswith("%%")]
    commands = [found.group(2).lstrip("%!") for source in python for found in _MAGIC.finditer(source)]
    return "\n".join(_MAGIC.sub(r"\1pass", source) for source in python), "\n".join(commands)


def _read(text: str) -> tuple[dict[str, Any], int | None]:
    try:
        notebook = json.loads(text)
    except ValueError as e:
        raise NotebookError(f"not JSON: {e}") from e
    if not isinstance(notebook, dict) or "cells" not in notebook:
        raise NotebookError("not a notebook of version 4")
    for indent in (1, 2, 4, None):
        if _dump(notebook, indent) + _ending(text) == text:
            return notebook, indent
    raise NotebookError("not laid out as Jupyter does, so that it could not be written back as it was")


def _dump(notebook: dict[str, Any], indent: int | None) -> str:
    return json.dumps(notebook, indent=indent, ensure_ascii=False)


def _ending(text: str) -> str:
    return text[len(text.rstrip("\n")) :]


def _show_magic(source: str, before: str, first_line: int) -> tuple[str, list[Finding]]:
    """Return a cell with its commands ported; findings are at the lines that these had before."""
    lines = [line_at(before, found.start(), first_line) for found in _HIDDEN.finditer(before)]
    commands = list(_HIDDEN.finditer(source))
    ported = [port_shell(command.group(2), line) for command, line in zip(commands, lines, strict=False)]
    texts = iter(text for text, _ in ported)
    shown = _HIDDEN.sub(lambda match: match.group(1) + next(texts, match.group(2)), source)
    return shown, [finding for _, findings in ported for finding in findings]


def _write(cell: dict[str, Any], source: str) -> None:
    cell["source"] = source.splitlines(keepends=True) if isinstance(cell["source"], list) else source
