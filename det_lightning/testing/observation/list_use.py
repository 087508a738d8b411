"""Search of a trial's source for lists that it only appends to, so that nothing depends on what is in them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

_APPENDING = {"append", "appendleft", "extend", "insert"}
_NEW_CONTAINERS = {"list", "dict", "deque", "defaultdict"}


class AppendedLists(ast.NodeVisitor):
    """The attributes and global variables, by name, that files only create anew and append to.

    A name that is used in another way anywhere, of whatever object, is not among them. If a file is not Python source,
    there are none.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._appended: set[tuple[type, str]] = set()
        self._used: set[tuple[type, str]] = set()
        self._is_known = True
        for file in files:
            try:
                self.visit(ast.parse(file.read_text(encoding="utf-8")))
            except (OSError, SyntaxError, UnicodeDecodeError):
                self._is_known = False

    def has_attribute(self, name: str) -> bool:
        """Return whether this is an attribute of some object, or of a class, that is only appended to."""
        return self._is_known and (ast.Attribute, name) in self._appended - self._used

    def has_variable(self, name: str) -> bool:
        """Return whether this is a global variable that is only appended to, also from other modules."""
        is_attribute = (ast.Attribute, name) in self._used
        return self._is_known and (ast.Name, name) in self._appended - self._used and not is_attribute

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call such as ``self.losses.append(loss)`` whose result nothing uses."""
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _APPENDING:
            self._note_appended(call.func.value)
            for argument in (*call.args, *call.keywords):
                self.visit(argument)
        else:
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add):
            self._note_appended(node.target)
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._note_assigned(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._note_assigned([node.target], node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            self._used.update((ast.Attribute, str(name)) for name in names)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        renamed = (alias.name for alias in node.names if alias.asname is not None)
        self._used.update((ast.Name, name) for name in renamed)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._used.add((ast.Attribute, node.attr))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._used.add((ast.Name, node.id))

    def _note_appended(self, to: ast.expr) -> None:
        while isinstance(to, ast.Subscript):  # self.losses["train"].append(loss)
            self.visit(to.slice)
            to = to.value
        if isinstance(to, ast.Attribute):
            self._appended.add((ast.Attribute, to.attr))
            self.visit(to.value)
        elif isinstance(to, ast.Name):
            self._appended.add((ast.Name, to.id))
        else:
            self.visit(to)

    def _note_assigned(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        target = targets[0]
        if value is not None:
            self.visit(value)
        if len(targets) > 1 or not (value is None or _is_new_container(value)):  # perhaps with another name too
            for each in targets:
                self.visit(each)
        elif isinstance(target, ast.Attribute):
            self.visit(target.value)
        elif not isinstance(target, ast.Name):
            self.visit(target)


def _is_new_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in _NEW_CONTAINERS
    return isinstance(value, ast.List | ast.ListComp | ast.Dict)
