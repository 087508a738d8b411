"""The attributes of a trial that hold what it wrapped, as expressions for a list.

``x`` is ``self.x`` itself, ``*x`` what ``self.x`` holds, ``*x.values()`` what it holds by name.
"""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, last_name, targets_of
from det_lightning.porting.to_lightning.module_file import ModuleFile, attribute_of_self

_SEVERAL = (cst.List, cst.ListComp, cst.Tuple, cst.Set, cst.GeneratorExp)
_BY_NAME = (cst.Dict, cst.DictComp)
_MODULES = ("ModuleList", "ModuleDict", "Sequential")
_CONTAINERS = (*_MODULES, "list", "tuple")
Assignments = list[tuple[str, cst.BaseExpression]]


def parameters_of(function: cst.FunctionDef) -> list[cst.Param]:
    """Return the parameters that can be passed by position."""
    return [*function.params.posonly_params, *function.params.params]


def as_item(holder: str) -> str:
    """Return a holder as an item of a list."""
    return f"*self.{holder[1:]}" if holder.startswith("*") else f"self.{holder}"


def renamed(holder: str, names: dict[str, str]) -> str:
    """Return a holder under its new name, if its attribute was renamed."""
    star = "*" if holder.startswith("*") else ""
    name, dot, rest = holder.removeprefix("*").partition(".")
    return star + names.get(name, name) + dot + rest


def holders_of(file: ModuleFile, call: cst.Call, assignments: Assignments) -> list[str]:
    """Return what holds the result of a call that wraps something; empty if the code does not say."""
    statement = file.statement(call)
    if isinstance(statement, cst.Return):  # of a method: what keeps its result
        function = file.function(call)
        name = "" if function is None else function.name.value
        calls = [(holder, value) for holder, value in assignments if isinstance(value, cst.Call)]
        return [holder for holder, value in calls if attribute_of_self(value.func) == name]
    if isinstance(statement, cst.Expr):
        return _holders_in_expression(statement, call, assignments)
    if isinstance(statement, cst.Assign | cst.AnnAssign) and statement.value is not None:
        return _holders_in_assignment(statement, statement.value, call, assignments)
    return []


def _holders_in_expression(statement: cst.Expr, call: cst.Call, assignments: Assignments) -> list[str]:
    outer = statement.value
    if outer is call:
        return _holders_of_name(call.args[0].value, assignments) if call.args else []
    if isinstance(outer, cst.Call) and isinstance(outer.func, cst.Attribute) and outer.func.attr.value == "append":
        name = attribute_of_self(outer.func.value)
        return [f"*{name}"] if name and outer.args[0].value is call else []
    return []


def _holders_of_name(value: cst.BaseExpression, assignments: Assignments) -> list[str]:
    """Return the attributes that a name stands for, or that it is assigned to."""
    if name := attribute_of_self(value):
        return [name]
    known = dotted_name(value)
    return [holder for holder, given in assignments if known and dotted_name(given) == known][:1]


def _holders_in_assignment(
    statement: cst.Assign | cst.AnnAssign, value: cst.BaseExpression, call: cst.Call, assignments: Assignments
) -> list[str]:
    target = targets_of(statement)[0]
    if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
        pairs = zip(target.elements, value.elements, strict=False)
        names = [attribute_of_self(left.value) for left, right in pairs if right.value is call]
        return [name for name in names if name]
    if isinstance(target, cst.Subscript):
        name = attribute_of_self(target.value)
        is_by_name = any(holder == name and _is_by_name(given) for holder, given in assignments)
        return [f"*{name}.values()"] if name and value is call and is_by_name else []
    if _is_result(value, call) and isinstance(target, cst.Name):
        return _holders_of_name(target, assignments)
    name = attribute_of_self(target)
    if not name:
        return []
    if _is_result(value, call):
        return [name]
    held = value
    if isinstance(value, cst.Call) and last_name(value.func) in _CONTAINERS and value.args:
        held = value.args[0].value
    if isinstance(held, _SEVERAL):
        return [f"*{name}"]
    return [f"*{name}.values()"] if isinstance(held, _BY_NAME) else []


def is_in_module(call: cst.Call, file: ModuleFile) -> bool:
    """Return whether a call is within a container that is a module, whose contents Lightning knows."""
    outer = [node for node in file.ancestors(call) if isinstance(node, cst.Call)]
    return any(last_name(node.func) in _MODULES for node in outer)


def _is_by_name(value: cst.BaseExpression) -> bool:
    return isinstance(value, _BY_NAME) or (isinstance(value, cst.Call) and dotted_name(value.func) == "dict")


def _is_result(value: cst.BaseExpression, call: cst.Call) -> bool:
    """Return whether an expression has the value of a call in at least one case."""
    if isinstance(value, cst.IfExp):
        return _is_result(value.body, call) or _is_result(value.orelse, call)
    return value is call
