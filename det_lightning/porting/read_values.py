"""Which hyperparameters and data settings code reads by constant names, and which of them a configuration lacks."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import NamedTuple

from det_lightning.porting.bypass_rules import get_name, parse

HPARAMS = "hyperparameters"
DATA = "data"
# By method of a context: the section that it returns, or the value that it reads.
_SECTIONS = {"get_hparams": HPARAMS, "get_data_config": DATA}
_VALUES = ("get_per_slot_batch_size", "get_global_batch_size")
_CHANGE = {"pop", "setdefault", "update"}
# A value in these is read under a condition only.
_CONDITIONAL = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.While, ast.Match, ast.Lambda, ast.comprehension)


class Read(NamedTuple):
    """A value that code reads whenever the function around it runs."""

    section: str  # of a configuration
    name: str
    line: int
    owner: str  # the class around; empty outside of classes
    function: str  # the innermost function around, or empty


def find_reads(text: str) -> tuple[Read, ...]:
    """Return the values read in a Python file, except those that the file also sets or asks for."""
    tree = parse(text)
    sections = _find_variables(tree)
    reads = [*_walk(tree, sections, "", "")]
    known = {*_find_known(tree)}
    return tuple(dict.fromkeys(read for read in reads if read.name not in known))


def list_bases(text: str) -> tuple[tuple[str, str], ...]:
    """Return each class of a file with each of its bases."""
    classes = [node for node in ast.walk(parse(text)) if isinstance(node, ast.ClassDef)]
    return tuple((node.name, get_name(base)) for node in classes for base in node.bases)


def _find_variables(tree: ast.Module) -> dict[str, str]:
    """Return the variables that always hold an unchanged section of the configuration, with that section."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found.setdefault(ast.unparse(target), set()).add(_find_section(node.value, {}))
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, set()).add("")
        elif isinstance(node, ast.Call) and get_name(node.func) in _CHANGE and isinstance(node.func, ast.Attribute):
            found.setdefault(ast.unparse(node.func.value), set()).add("")
    return {name: section for name, (section, *others) in found.items() if section and not others}


def _find_section(node: ast.expr | None, variables: dict[str, str]) -> str:
    """Return the section that an expression stands for, or an empty text."""
    if isinstance(node, ast.Call):
        return _SECTIONS.get(get_name(node.func), "") if not node.args else ""
    if isinstance(node, ast.Attribute) and node.attr == "hparams" and get_name(node.value) == "trial":
        return HPARAMS
    return variables.get(ast.unparse(node), "") if isinstance(node, ast.Name | ast.Attribute) else ""


def _find_known(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file sets or asks for in some section."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield str(getattr(node.slice, "value", ""))
        elif isinstance(node, ast.Compare):
            yield str(getattr(node.left, "value", ""))


def _walk(node: ast.AST, sections: dict[str, str], owner: str, function: str) -> Iterator[Read]:
    """Yield the reads below a node, without those under a condition."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, sections, child.name, "")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            end = _find_exit(child)
            yield from (read for read in _walk(child, sections, owner, child.name) if read.line <= end)
        elif not isinstance(child, _CONDITIONAL) or _is_start(child):
            if (found := _find_read(child, sections)) is not None:
                yield Read(*found, getattr(child, "lineno", 0), owner, function)
            yield from _walk(child, sections, owner, function)


def _find_exit(function: ast.AST) -> float:
    """Return the line of the first conditional return or raise, below which code may not run."""
    choices = [node for node in ast.walk(function) if isinstance(node, (*_CONDITIONAL, ast.For))]
    exits = [inner for node in choices for inner in ast.walk(node) if isinstance(inner, ast.Return | ast.Raise)]
    return min((node.lineno for node in exits), default=math.inf)


def _is_start(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and get_name(getattr(node.test, "left", None)) == "__name__"


def _find_read(node: ast.AST, sections: dict[str, str]) -> tuple[str, str] | None:
    """Return the section and the name that an expression reads, or None."""
    if isinstance(node, ast.Call) and get_name(node.func) in _VALUES:
        return HPARAMS, "global_batch_size"
    if isinstance(node, ast.Call) and get_name(node.func) == "get_hparam" and len(node.args) == 1:
        section, name = HPARAMS, node.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        section, name = _find_section(node.value, sections), node.slice
    else:
        return None
    value = name.value if isinstance(name, ast.Constant) else None
    return (section, value) if section and isinstance(value, str) else None
