"""Searches a trial's source: hard-coded devices, process groups, hyperparameters, lists that are only appended to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

_DEVICE_CALLS = {"to", "device", "set_device", "set_default_device"}
_PROCESS_GROUPS = {"init_process_group", "destroy_process_group", "DistributedDataParallel", "DistributedSampler",
                   "DataParallel", "all_reduce", "all_gather", "all_gather_object"}  # fmt: skip
_BATCH_SIZES = {"get_per_slot_batch_size", "get_global_batch_size"}
_APPENDING = {"append", "appendleft", "extend", "insert"}
_NEW_CONTAINERS = {"list", "dict", "deque", "defaultdict"}


def lines_in(files: Iterable[Path], directory: Path, is_found: Callable[[ast.expr], bool]) -> list[str]:
    """Return the expressions for which ``is_found`` is true, as ``"file:line: code"``.

    Those that depend on ``torch.cuda.is_available()`` are left out.
    """
    return [f"{line}: {ast.unparse(node)}" for line, node in _expressions(files, directory) if is_found(node)]


def hparams_in(files: Iterable[Path], directory: Path) -> dict[str, str]:
    """Return the hyperparameters that are read by name, with the line where each is first read."""
    found: dict[str, str] = {}
    for line, node in _expressions(files, directory):
        name = _name_of(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name == "get_hparam" and node.args and isinstance(node.args[0], ast.Constant):
            found.setdefault(str(node.args[0].value), line)
        elif name in _BATCH_SIZES:
            found.setdefault("global_batch_size", line)
    return found


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _expressions(files: Iterable[Path], directory: Path) -> Iterator[tuple[str, ast.expr]]:
    """Yield every expression with its line, except those that run only when the file is run as a script."""
    for file in files:
        if (tree := _parsed(file)) is None:
            continue
        shown = file.relative_to(directory) if file.is_relative_to(directory) else file
        for node in _walk(tree, _only_for_scripts(tree), _flags_of_devices(tree)):
            if isinstance(node, ast.expr):
                yield f"{shown}:{node.lineno}", node


def _walk(tree: ast.AST, left_out: set[ast.AST], flags: set[str]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if child in left_out or (isinstance(child, ast.If | ast.IfExp) and _depends_on_device(child.test, flags)):
            continue
        yield child
        yield from _walk(child, left_out, flags)


def _depends_on_device(test: ast.AST, flags: Container[str] = ()) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "is_available")
        or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in flags)
        for node in ast.walk(test)
    )


def _flags_of_devices(tree: ast.AST) -> set[str]:
    """Return the names of flags such as ``use_cuda = torch.cuda.is_available()``."""
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_flag(node.value)]
    return {ast.unparse(target) for node in assignments for target in node.targets}


def _is_flag(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return _name_of(value.func) == "is_available"
    return isinstance(value, ast.BoolOp | ast.UnaryOp | ast.Compare) and _depends_on_device(value)


def _only_for_scripts(tree: ast.Module) -> set[ast.AST]:
    """Return the ``if __name__ == "__main__"`` blocks, and the functions that only these refer to."""
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    called = _names_in(guards)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in called}
    left_out: set[ast.AST] = {*guards, *functions.values()}
    elsewhere = _names_in(node for node in tree.body if node not in left_out)
    return left_out - {node for name, node in functions.items() if name in elsewhere}


def _names_in(trees: Iterable[ast.AST]) -> set[str]:
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _name_of(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def handles_processes(call: ast.expr) -> bool:
    """Return whether it is a call that bypasses the context to connect processes, or to share models and data.

    Some methods of the context have the same names as functions of ``torch.distributed``.
    """
    if not isinstance(call, ast.Call):
        return False
    name = _name_of(call.func)
    module = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if module.endswith("samplers") or any(given.arg == "num_workers" for given in call.keywords):
        return False  # pytorch.samplers.DistributedSampler, which has other arguments than torch's
    if module in ("dist", "torch.distributed"):
        return name not in ("is_available", "is_initialized")
    return name in _PROCESS_GROUPS and "context" not in module


def fixes_device(node: ast.expr) -> bool:
    """Return whether an expression hard-codes a device."""
    if isinstance(node, ast.Attribute) and node.attr.endswith("Tensor"):
        return ast.unparse(node.value) == "torch.cuda"
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "CUDA_VISIBLE_DEVICES"
    if not isinstance(node, ast.Call):
        return False
    name = _name_of(node.func)
    if name == "cuda" and isinstance(node.func, ast.Attribute):
        return True
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("device", "map_location")]
    named += node.args[:1] if name in _DEVICE_CALLS else []
    devices = [str(value.value).partition(":")[0] for value in named if isinstance(value, ast.Constant)]
    return not {"cuda", "mps", "xpu"}.isdisjoint(devices) or (name == "set_device" and bool(node.args))


def appended_lists(files: Iterable[Path]) -> tuple[set[str], set[str]]:
    """Return the names of the attributes, and of the global variables, that files only create anew and append to.

    A name that is used in another way anywhere, on any object, is not among them. If a file is not Python source, there
    are none.
    """
    trees = [_parsed(file) for file in files]
    nodes = [] if None in trees else [node for tree in trees if tree is not None for node in ast.walk(tree)]
    appended = [to for node in nodes if (to := _appended_by(node)) is not None]
    no_use = {*appended, *filter(None, map(_created_by, nodes))}
    used: set[tuple[type, str]] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and node not in no_use:
            used.add((type(node), _name_of(node)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            used.update((ast.Attribute, str(name)) for name in names)
        elif isinstance(node, ast.ImportFrom):
            used.update((ast.Name, alias.name) for alias in node.names if alias.asname is not None)
    only = {(type(to), _name_of(to)) for to in appended} - used
    attributes = {name for kind, name in only if kind is ast.Attribute}
    # Other modules refer to a global variable as an attribute.
    variables = {name for kind, name in only if kind is ast.Name and (ast.Attribute, name) not in used}
    return attributes, variables


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
        return _name_of(value.func) in _NEW_CONTAINERS
    return isinstance(value, ast.List | ast.ListComp | ast.Dict)
