"""Searches a trial's source for lists that it only appends to, so that nothing depends on their content."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

_APPENDING = {"append", "appendleft", "extend", "insert"}
_NEW_CONTAINERS = {"list", "dict", "deque", "defaultdict"}


class AppendedLists:
    """The attributes and global variables, by name, that files only create anew and append to.

    A name that is used in another way anywhere, on any object, is not among them. If a file is not Python source, there
    are none.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._appended: set[tuple[type, str]] = set()
        self._used: set[tuple[type, str]] = set()
        self._is_known = True
        for file in files:
            try:
                self._read(ast.parse(file.read_text(encoding="utf-8")))
            except (OSError, SyntaxError, UnicodeDecodeError):
                self._is_known = False

    def has_attribute(self, name: str) -> bool:
        """Return whether an attribute of that name, on an object or a class, is only appended to."""
        return self._is_known and (ast.Attribute, name) in self._appended - self._used

    def has_variable(self, name: str) -> bool:
        """Return whether a global variable of that name is only appended to, even from other modules."""
        is_attribute = (ast.Attribute, name) in self._used
        return self._is_known and (ast.Name, name) in self._appended - self._used and not is_attribute

    def _read(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        appended = [to for node in nodes if (to := _appended_by(node)) is not None]
        no_use = {*appended, *filter(None, map(_created_by, nodes))}
        self._appended.update((type(to), _name_of(to)) for to in appended)
        for node in nodes:
            if isinstance(node, ast.Attribute | ast.Name) and node not in no_use:
                self._used.add((type(node), _name_of(node)))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
                self._used.update((ast.Attribute, str(name)) for name in names)
            elif isinstance(node, ast.ImportFrom):
                self._used.update((ast.Name, alias.name) for alias in node.names if alias.asname is not None)


def _appended_by(node: ast.AST) -> ast.Attribute | ast.Name | None:
    """Return what a statement such as ``self.losses["train"].append(loss)`` or ``losses += [loss]`` appends to."""
    to: ast.expr | None = None
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        to = node.target
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        method = node.value.func
        to = method.value if isinstance(method, ast.Attribute) and method.attr in _APPENDING else None
    while isinstance(to, ast.Subscript):
        to = to.value
    return to if isinstance(to, ast.Attribute | ast.Name) else None


def _created_by(node: ast.AST) -> ast.expr | None:
    """Return what an assignment gives a new container, or only declares; None if it has another name too, perhaps."""
    if isinstance(node, ast.AnnAssign):
        return node.target if node.value is None or _is_new_container(node.value) else None
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_new_container(node.value):
        return node.targets[0]
    return None


def _is_new_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in _NEW_CONTAINERS
    return isinstance(value, ast.List | ast.ListComp | ast.Dict)


def _name_of(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id
