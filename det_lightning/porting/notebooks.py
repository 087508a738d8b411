"""Notebooks: the code of all cells, ported as one program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import libcst as cst

from det_lightning.porting.commands import port_shell
from det_lightning.porting.facts import Facts, Kind, read_command_facts, read_python_facts
from det_lightning.porting.findings import Finding, Severity, drop_resolved, line_at
from det_lightning.porting.python_files import port_python

_END_OF_CELL = "#:::end of cell:::\n"
_MARK = "#:::"
_HIDE = "pass  #:::"
# A command, with lines joined by backslashes and perhaps a variable for the output; or a question.
_MAGIC = re.compile(
    r"^([ \t]*)((?:\w[\w.,\[\]\"' \t]*=[ \t]*)?[%!](?:[^\n]*\\\n)*[^\n]*|\?[^\n]*|[\w.*]+\?{1,2}[ \t]*)$", re.MULTILINE
)
_HIDDEN = re.compile(rf"^([ \t]*){_HIDE}([^\n]*(?:(?<=\\)\n[ \t]*{_HIDE}[^\n]*)*)$", re.MULTILINE)
_NEXT_HIDDEN = re.compile(rf"\n[ \t]*{_HIDE}")
# The magic in the first line decides for the whole cell.
_OF_CELL = re.compile(r"\s*%%(\S*)")
_PYTHON = ("capture", "memit", "mprun", "prun", "time", "timeit")
_SHELL = ("!", "bash", "script", "sh", "sx", "system")


class NotebookError(ValueError):
    """The file is not a notebook, or has a layout that cannot be reproduced."""


def _dump(notebook: dict[str, Any], line_break: str, **options: Any) -> str:
    """Return the text of a notebook up to the last brace."""
    return json.dumps(notebook, **options).replace("\n", line_break)


_Dump = Callable[[dict[str, Any]], str]
# Jupyter, Colab, Kaggle and editors write notebooks differently.
_INDENTED: list[tuple[int | str | None, tuple[str, str]]] = [(indent, (",", ": ")) for indent in (1, 2, 4, 3, "\t", 0)]
_INDENTS = [*_INDENTED, (None, (", ", ": ")), (None, (",", ":"))]
_LAYOUTS: list[_Dump] = [
    functools.partial(_dump, line_break=line_break, indent=indent, separators=separators, ensure_ascii=escapes)
    for (indent, separators), escapes, line_break in itertools.product(_INDENTS, (False, True), ("\n", "\r\n"))
]


def port_notebook(text: str) -> tuple[str, list[Finding]]:
    """Return a notebook with the code cells ported, and findings, without lines declared resolved by a comment."""
    notebook, dump = _read(text)
    cells = _select_cells(notebook)
    hidden = [_hide(source) for _, source in cells]
    program, numbers = read_program(text)
    ported, findings = port_python(program)
    line = 1
    for (cell, before), source, old in zip(cells, ported.split(_END_OF_CELL), hidden, strict=False):
        shown, found = _show_magic(source.removesuffix("\n"), old, line)
        findings += found
        line += old.rstrip("\n").count("\n") + 2
        shown += before[len(before.rstrip("\n")) :]
        cell["source"] = shown.splitlines(keepends=True) if isinstance(cell["source"], list) else shown
    located = [dataclasses.replace(one, line=numbers[one.line]) for one in drop_resolved(findings, program)]
    return dump(notebook) + _ending(text), located + _findings_of_others(notebook)


def read_program(text: str) -> tuple[str, list[int]]:
    """Return the Python of a notebook as one program, and the line in the file of each of its lines (0: none)."""
    notebook, dump = _read(text)
    cells = _select_cells(notebook)
    program = "".join(_hide(source) + "\n" + _END_OF_CELL for _, source in cells)
    return program, [0, *_number_lines(notebook, cells, dump)]


def _number_lines(notebook: dict[str, Any], cells: list[tuple[dict[str, Any], str]], dump: _Dump) -> list[int]:
    """Return the line in the file for each line of the program of all cells, with 0 for the end of each cell."""
    sources = [cell["source"] for cell, _ in cells]
    for (cell, text), source in zip(cells, sources, strict=True):
        cell["source"] = _MARK + text if isinstance(source, str) else [_MARK + part for part in source]
    marked = enumerate(dump(notebook).split("\n"), 1)
    numbers = iter([number for number, line in marked for _ in range(line.count(f'"{_MARK}'))])
    lines: list[int] = []
    for (cell, text), source in zip(cells, sources, strict=True):
        cell["source"] = source
        parts = [source] if isinstance(source, str) else source
        found = [number for part in parts for number in [next(numbers)] * (part.count("\n") + (part[-1:] != "\n"))]
        count = text.rstrip("\n").count("\n") + 1
        lines += [*found[:count], *[0] * (count - len(found)), 0]
    return lines


def split_notebook(text: str) -> tuple[str, str]:
    """Return the Python of a notebook as one program, and the commands, one per line; or raise NotebookError."""
    notebook, _ = _read(text)
    hidden = [_hide(source) for _, source in _select_cells(notebook)]
    commands = [_reveal(found).lstrip("%!") for source in hidden for found in _HIDDEN.finditer(source)]
    return "\n".join(hidden), "\n".join(commands)


def read_notebook_facts(text: str) -> Facts:
    """Return the facts in the code and the commands of a ported notebook."""
    program, commands = split_notebook(text)
    python = read_python_facts(program, Kind.notebook)
    started = read_command_facts(commands, Kind.notebook)
    return dataclasses.replace(
        python,
        kind=Kind.notebook,
        starts=(*python.starts, *started.starts),
        uses_determined=python.uses_determined or started.uses_determined,
    )


def _read(text: str) -> tuple[dict[str, Any], _Dump]:
    """Return a notebook, and a function to write the notebook in the same layout."""
    try:
        notebook = json.loads(text)
    except ValueError as e:
        raise NotebookError(f"not JSON: {e}") from e
    if not isinstance(notebook, dict) or not _are_cells(notebook.get("cells")):
        raise NotebookError("not a notebook of version 4")
    body = text[: len(text) - len(_ending(text))]
    for dump in _LAYOUTS:
        # The first characters rule out most layouts, and notebooks may be large.
        if dump({"": 0})[:2] == body[:2] and dump(notebook) == body:
            return notebook, dump
    raise NotebookError("an unknown layout, which could not be reproduced")


def _are_cells(cells: Any) -> bool:
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return False
    sources = [cell.get("source") for cell in cells if cell.get("cell_type") == "code"]
    return all(
        isinstance(line, str) for source in sources for line in (source if isinstance(source, list) else [source])
    )


def _code_cells(notebook: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    return [(cell, "".join(cell["source"])) for cell in notebook["cells"] if cell.get("cell_type") == "code"]


def _select_cells(notebook: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return code cells and their source, without those that are no code for Python or the shell."""
    return [
        (cell, source)
        for cell, source in _code_cells(notebook)
        if _find_magic(source) in (None, *_PYTHON, *_SHELL) and _find_error(source) is None
    ]


def _find_error(source: str) -> cst.ParserSyntaxError | None:
    """Return why a cell is not Python, such as a placeholder in it."""
    try:
        cst.parse_module(_hide(source) + "\n")
    except cst.ParserSyntaxError as e:
        return e
    return None


def _find_magic(source: str) -> str | None:
    found = _OF_CELL.match(source)
    return None if found is None else found.group(1)


def _findings_of_others(notebook: dict[str, Any]) -> list[Finding]:
    magics = {_find_magic(source) for _, source in _code_cells(notebook) if re.search(r"\bdetermined\b", source)}
    advice = "port the cell by hand, or keep the code in a separate file"
    found = [
        Finding(0, Severity.check, f"a cell that begins with %%{magic} stays as it is, and names determined", advice)
        for magic in magics - {None, *_PYTHON, *_SHELL}
    ]
    for number, cell in enumerate(notebook["cells"], 1):
        source = "".join(cell["source"]) if cell.get("cell_type") == "code" else ""
        if _find_magic(source) in (None, *_PYTHON) and (error := _find_error(source)) is not None:
            reason = f"cell {number}, line {error.raw_line}: not ported, because it is not Python 3"
            found.append(Finding(0, Severity.problem, reason, "complete the cell"))
    is_ours = any(re.search(r"\bdetermined\b|\bdet_lightning\b", source) for _, source in _code_cells(notebook))
    return found if is_ours else []


def _ending(text: str) -> str:
    return text[len(text.rstrip("\r\n")) :]


# Lines other than Python, hidden in comments during porting


def _hide(source: str) -> str:
    source = source.rstrip("\n")  # a backslash at the end would join the next cell
    if _find_magic(source) in _SHELL:
        return _HIDE + source.replace("\n", f"\n{_HIDE}")
    return _MAGIC.sub(lambda found: found[1] + _HIDE + found[2].replace("\n", f"\n{found[1]}{_HIDE}"), source)


def _reveal(found: re.Match[str]) -> str:
    return _NEXT_HIDDEN.sub("\n", found[2])


def _show_magic(source: str, before: str, first_line: int) -> tuple[str, list[Finding]]:
    """Port the commands of a cell; line numbers of the findings are those before porting."""
    whole = re.sub(rf"^{_HIDE}", "", source, flags=re.MULTILINE)
    if _find_magic(whole) in _SHELL:
        return port_shell(whole, first_line)
    lines = [line_at(before, found.start(), first_line) for found in _HIDDEN.finditer(before)]
    commands = list(_HIDDEN.finditer(source))
    ported = [port_shell(_reveal(command), line) for command, line in zip(commands, lines, strict=False)]
    texts = iter(text for text, _ in ported)
    shown = _HIDDEN.sub(lambda found: found[1] + next(texts, _reveal(found)), source)
    return shown, [finding for _, findings in ported for finding in findings]
