"""Python source, in files and in notebooks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from det_lightning.porting.bindings import Bindings
from det_lightning.porting.bypasses import note_bypasses, note_cluster_uses, note_devices
from det_lightning.porting.commands import port_shell
from det_lightning.porting.counterparts import counterpart, missing, missing_prefix
from det_lightning.porting.facts import CORE_CONTEXT
from det_lightning.porting.findings import Finding, Premise, line_at
from det_lightning.porting.imports import ImportRewriter
from det_lightning.porting.older_libraries import note_older_libraries
from det_lightning.porting.older_releases import rewrite_core_api, rewrite_older_releases
from det_lightning.porting.python_syntax import PythonFile, find_classes
from det_lightning.porting.strings import note_python_variables, rewrite_started_commands, rewrite_strings

# Without one of these there is nothing to find, and parsing takes its time.
_WORTH_PARSING = re.compile(
    r"determined|det_lightning|model_hub|pedl|attrdict|cuda|distributed|DataParallel|horovod|apex|get_cluster_info|"
    r"DET_|\bdet\b(?=[\s\"'])|core_context\."
)


def port_python(text: str) -> tuple[str, list[Finding]]:
    """Return Python source that uses det_lightning, and what could not be rewritten."""
    if not _WORTH_PARSING.search(text):
        return text, []
    file = PythonFile(text)
    imports = ImportRewriter(file)
    imports.rewrite()
    ported = Bindings(file, "det_lightning")
    _note_missing_attributes(file, ported)
    if "determined" in text:
        rewrite_strings(file, imports)
    rewrite_started_commands(file)
    note_python_variables(file)
    classes = find_classes(file)
    uses_trials = imports.bindings.uses_trial_api() or ported.uses_trial_api()
    if uses_trials:
        rewrite_older_releases(file, classes["trial"], classes["callback"])
    found = [*imports.bindings.found, *ported.found]
    if found or uses_trials:
        note_cluster_uses(file, {binding.name for binding in found if binding.path == "determined.pytorch.Trainer"})
        note_older_libraries(file)
    if found or uses_trials or CORE_CONTEXT.search(text):
        rewrite_core_api(file)
    note_bypasses(file, classes["trial"])
    # A script for the Core API has no context: it sets up devices and processes by itself, here as on Determined.
    if uses_trials or not (imports.bindings.uses_core_api() or ported.uses_core_api()):
        known = len(file.findings)
        note_devices(file)
        if not uses_trials:
            found_here = file.findings[known:]
            file.findings[known:] = [dataclasses.replace(finding, premise=Premise.in_trial) for finding in found_here]
    return file.edits.result(), file.findings


def _note_missing_attributes(file: PythonFile, ported: Bindings) -> None:
    for use in ported.references:
        private = any(attribute.attr.value.startswith("_") for attribute in use.attributes)
        is_missing = counterpart(use.path) is None and counterpart(use.binding.path) is not None
        if use.attributes and is_missing and not private:
            file.findings.append(missing(missing_prefix(use.path), file.line(use.node)))


# Notebooks: the code of their cells, ported as one program


_END_OF_CELL = "#:::end of cell:::\n"
_MAGIC = re.compile(r"^([ \t]*)([%!?][^\n]*)$", re.MULTILINE)
_HIDDEN = re.compile(r"^([ \t]*)pass  #:::([^\n]*)$", re.MULTILINE)


class NotebookError(ValueError):
    """The file is not a notebook that can be written back as it was."""


def _dump(notebook: dict[str, Any], line_break: str, **options: Any) -> str:
    """Return the text of a notebook, without what follows its last brace."""
    return json.dumps(notebook, **options).replace("\n", line_break)


_Dump = Callable[[dict[str, Any]], str]
# Jupyter, Colab, Kaggle and editors each have their own way to write notebooks.
_INDENTED: list[tuple[int | str | None, tuple[str, str]]] = [(indent, (",", ": ")) for indent in (1, 2, 4, 3, "\t", 0)]
_INDENTS = [*_INDENTED, (None, (", ", ": ")), (None, (",", ":"))]
_LAYOUTS: list[_Dump] = [
    functools.partial(_dump, line_break=line_break, indent=indent, separators=separators, ensure_ascii=escapes)
    for (indent, separators), escapes, line_break in itertools.product(_INDENTS, (False, True), ("\n", "\r\n"))
]


def port_notebook(text: str) -> tuple[str, list[Finding]]:
    """Return a notebook with its code cells ported, and findings, whose lines count over the code of all cells."""
    notebook, dump = _read(text)
    cells = _python_cells(notebook)
    hidden = [_MAGIC.sub(r"\1pass  #:::\2", source) for _, source in cells]
    program = "".join(source.rstrip("\n") + "\n" + _END_OF_CELL for source in hidden)
    ported, findings = port_python(program)
    line = 1
    for (cell, before), source, old in zip(cells, ported.split(_END_OF_CELL), hidden, strict=False):
        shown, found = _show_magic(source.removesuffix("\n"), old, line)
        findings += found
        line += old.rstrip("\n").count("\n") + 2
        shown += before[len(before.rstrip("\n")) :]
        cell["source"] = shown.splitlines(keepends=True) if isinstance(cell["source"], list) else shown
    return dump(notebook) + _ending(text), findings


def parts_of(text: str) -> tuple[str, str]:
    """Return the Python of a notebook as one program, and the commands in it, a line each; or raise NotebookError."""
    notebook, _ = _read(text)
    python = [source for _, source in _python_cells(notebook)]
    commands = [found.group(2).lstrip("%!") for source in python for found in _MAGIC.finditer(source)]
    return "\n".join(_MAGIC.sub(r"\1pass", source) for source in python), "\n".join(commands)


def _read(text: str) -> tuple[dict[str, Any], _Dump]:
    """Return a notebook, and a function that writes it in its current layout."""
    try:
        notebook = json.loads(text)
    except ValueError as e:
        raise NotebookError(f"not JSON: {e}") from e
    if not isinstance(notebook, dict) or not _are_cells(notebook.get("cells")):
        raise NotebookError("not a notebook of version 4")
    body = text[: len(text) - len(_ending(text))]
    for dump in _LAYOUTS:
        # Most are told apart by their first characters, and notebooks may be large.
        if dump({"": 0})[:2] == body[:2] and dump(notebook) == body:
            return notebook, dump
    raise NotebookError("not laid out as any program does, so that it could not be written back as it was")


def _are_cells(cells: Any) -> bool:
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return False
    sources = [cell.get("source") for cell in cells if cell.get("cell_type") == "code"]
    return all(
        isinstance(line, str) for source in sources for line in (source if isinstance(source, list) else [source])
    )


def _python_cells(notebook: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return code cells and their source, without those that another program runs, which begin with two signs."""
    cells = [(cell, "".join(cell["source"])) for cell in notebook["cells"] if cell.get("cell_type") == "code"]
    return [(cell, source) for cell, source in cells if not source.lstrip().startswith("%%")]


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
