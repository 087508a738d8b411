"""The order of imports that isort and ruff expect."""

from __future__ import annotations

import ast
import sys

_Import = ast.Import | ast.ImportFrom


def with_sorted_imports(text: str) -> str:
    """Return Python source with the first block of imports sorted; a block with comments stays as it is.

    Python's own modules come first. Others stay in the user's groups, which empty lines separate.
    """
    lines = text.splitlines(keepends=True)
    block = _first_block(ast.parse(text), lines)
    if not block:
        return text
    first = block[0].lineno - 1
    last = block[-1].end_lineno or block[-1].lineno
    groups = _groups(block)
    written = ["\n".join(_written(group, text)) for group in groups if group]
    return "".join([*lines[:first], "\n\n".join(written), "\n", *lines[last:]])


def _first_block(tree: ast.Module, lines: list[str]) -> list[_Import]:
    """Return the imports at the top of a module, below its docstring, up to a comment or another statement."""
    block: list[_Import] = []
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    for statement in statements:
        if not isinstance(statement, _Import):
            break
        before = lines[block[-1].end_lineno or 0 : statement.lineno - 1] if block else []
        own = lines[statement.lineno - 1 : statement.end_lineno]
        if any(line.strip() for line in before) or any("#" in line or ";" in line for line in own):
            break
        block.append(statement)
    return block


def _groups(block: list[_Import]) -> list[list[_Import]]:
    future: list[_Import] = []
    pythons_own: list[_Import] = []
    others: list[list[_Import]] = [[]]
    for position, statement in enumerate(block):
        if position and statement.lineno - 1 > (block[position - 1].end_lineno or 0):  # after an empty line
            others.append([])
        module = _module(statement)
        if module == "__future__":
            future.append(statement)
        elif module.partition(".")[0] in sys.stdlib_module_names:
            pythons_own.append(statement)
        else:
            others[-1].append(statement)
    return [future, pythons_own, *others]


def _module(statement: _Import) -> str:
    if isinstance(statement, ast.Import):
        return statement.names[0].name
    return "." * statement.level + (statement.module or "")


def _written(group: list[_Import], text: str) -> list[str]:
    """Return the lines of a group: ``import a`` before ``from a import b``, each by module, and each module once."""
    by_module: dict[str, list[ast.ImportFrom]] = {}
    for statement in group:
        if isinstance(statement, ast.ImportFrom):
            by_module.setdefault(_module(statement), []).append(statement)
    plain = sorted((node for node in group if isinstance(node, ast.Import)), key=lambda node: _module(node).lower())
    written = [ast.get_source_segment(text, node) or "" for node in plain]
    for module in sorted(by_module, key=lambda name: (not name.startswith("."), name.lower())):
        same = by_module[module]
        written += [ast.get_source_segment(text, same[0]) or ""] if len(same) == 1 else [_merged(module, same)]
    return written


def _merged(module: str, statements: list[ast.ImportFrom]) -> str:
    names = {
        f"{name.name} as {name.asname}" if name.asname else name.name for node in statements for name in node.names
    }
    return f"from {module} import {', '.join(sorted(names, key=_by_kind))}"


def _by_kind(name: str) -> tuple[int, str]:
    """Return a key that sorts CONSTANTS before Classes before other names."""
    is_constant = name.isupper() and len(name) > 1
    return (0 if is_constant else 1 if name[0].isupper() else 2, name.lower())
