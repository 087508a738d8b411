"""Statements that share a line, written on lines of their own."""

from __future__ import annotations

import itertools

import libcst as cst

from det_lightning.porting.python_syntax import PythonFile, last_name


def expand_blocks(text: str) -> str:
    """Return source in which each statement of a trial has a line of its own, so that others can replace it."""
    file = PythonFile(text)
    for trial in file.find(cst.ClassDef):
        if any(last_name(base.value) == "PyTorchTrial" for base in trial.bases):
            for block in file.find(cst.SimpleStatementSuite, cst.SimpleStatementLine, within=trial):
                _expand(file, block)
    return file.edits.result()


def _expand(file: PythonFile, block: cst.SimpleStatementSuite | cst.SimpleStatementLine) -> None:
    statements = list(block.body)
    spans = [file.span(statement) for statement in statements]
    line = file.edits.indentation(spans[0][0])
    if isinstance(block, cst.SimpleStatementSuite):
        line += file.module.default_indent
        head = file.edits.text[: spans[0][0]].rstrip(" \t\\")
        file.edits.replace(len(head), spans[0][0], "\n" + line)
    for (_, end), (start, _) in itertools.pairwise(spans):
        file.edits.replace(end, start, "\n" + line)
    last = statements[-1].semicolon
    if isinstance(last, cst.Semicolon):
        end = spans[-1][1]
        file.edits.replace(end, file.edits.text.index(";", end) + 1, "")
