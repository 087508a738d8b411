"""Searches a trial's source: hard-coded devices, process groups, hyperparameters, lists that are only appended to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from det_lightning.bypass_rules import find_bypasses, name_of, parse

_BATCH_SIZES = {"get_per_slot_batch_size", "get_global_batch_size"}
_INDICES = ("batch_idx", "epoch_idx", "current_train_batch", "current_train_epoch")
_GENERATORS = {"default_rng", "RandomState", "Random", "Generator"}
_CHANCES = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "now", "urandom", "uuid4", "getpid"}
_CHANCE_MODULES = ("time", "os.", "uuid", "datetime", "urandom", "getpid", "perf_counter")
_REPORTING = ("print", "log", "debug", "info", "warning", "write", "add_", "set_postfix", "flush")
_APPENDING = {"append", "appendleft", "extend", "insert"}
_NEW_CONTAINERS = {"list", "dict", "deque", "defaultdict"}


def lines_in(files: Iterable[Path], directory: Path, is_found: Callable[[ast.expr], bool]) -> list[str]:
    """Return the expressions for which ``is_found`` is true, as ``"file:line: code"``."""
    return [f"{line}: {ast.unparse(node)}" for line, node in _expressions(files, directory) if is_found(node)]


def bypasses_in(files: Iterable[Path], directory: Path, kind: str) -> list[str]:
    """Return what bypasses the context, as ``"file:line: code"``, other than the current GPU where there is one."""
    return [
        f"{_shown(file, directory)}:{found.line}: {found.code}"
        for file in files
        if (tree := _parsed(file)) is not None
        for found in find_bypasses(tree, _only_for_scripts(tree))
        if found.kind == kind and not found.follows_availability
    ]


def _shown(file: Path, directory: Path) -> Path:
    return file.relative_to(directory) if file.is_relative_to(directory) else file


def hparams_in(files: Iterable[Path], directory: Path) -> dict[str, str]:
    """Return the hyperparameters that are read by name, with the line where each is first read."""
    found: dict[str, str] = {}
    for line, node in _expressions(files, directory):
        name = name_of(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name == "get_hparam" and node.args and isinstance(node.args[0], ast.Constant):
            found.setdefault(str(node.args[0].value), line)
        elif name in _BATCH_SIZES:
            found.setdefault("global_batch_size", line)
    return found


def _parsed(file: Path) -> ast.Module | None:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _expressions(files: Iterable[Path], directory: Path) -> Iterator[tuple[str, ast.expr]]:
    """Yield every expression with its line, except those that run only when the file is run as a script."""
    for file in files:
        if (tree := _parsed(file)) is None:
            continue
        for node in _walk(tree, _only_for_scripts(tree)):
            if isinstance(node, ast.expr):
                yield f"{_shown(file, directory)}:{node.lineno}", node


def _walk(tree: ast.AST, left_out: set[ast.AST]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if child not in left_out:
            yield child
            yield from _walk(child, left_out)


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


def reads_rank(node: ast.expr) -> bool:
    """Return whether an expression asks for the rank of this process."""
    return name_of(node) in ("rank", "get_rank", "local_rank") and isinstance(node, ast.Attribute)


def depends_on_hash(node: ast.expr) -> bool:
    """Return whether an expression makes a set, or asks for a hash."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "hash")
    return is_call or isinstance(node, ast.Set | ast.SetComp)


def may_be_unseeded(node: ast.expr) -> bool:
    """Return whether it is a call that makes a generator without a seed, or asks for the time or another chance."""
    if not isinstance(node, ast.Call):
        return False
    is_unseeded = name_of(node.func) in _GENERATORS and not (node.args or node.keywords)
    return is_unseeded or (name_of(node.func) in _CHANCES and ast.unparse(node.func).startswith(_CHANCE_MODULES))


def name_assigned(name: str) -> Callable[[ast.expr], bool]:
    """Return a test for the assignment of an attribute or variable."""
    return lambda node: name_of(node) == name and isinstance(getattr(node, "ctx", None), ast.Store)


def text_is(text: str) -> Callable[[ast.expr], bool]:
    """Return a test for a string, such as the name of a metric."""
    return lambda node: isinstance(node, ast.Constant) and node.value == text


def compares_index(node: ast.expr) -> bool:
    """Return whether an expression decides something by the index of a batch or an epoch."""
    if not (isinstance(node, ast.Compare) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))):
        return False
    return any(name_of(part).startswith(_INDICES) for part in ast.walk(node))


def sizes_batch(node: ast.expr) -> bool:
    """Return whether it is the call of a loader with a batch size, or asks for the global one."""
    if not isinstance(node, ast.Call):
        return False
    return name_of(node.func) == "get_global_batch_size" or any(given.arg == "batch_size" for given in node.keywords)


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
            used.add((type(node), name_of(node)))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            used.update((ast.Attribute, str(name)) for name in names)
        elif isinstance(node, ast.ImportFrom):
            used.update((ast.Name, alias.name) for alias in node.names if alias.asname is not None)
    only = {(type(to), name_of(to)) for to in appended} - used
    attributes = {name for kind, name in only if kind is ast.Attribute}
    # Other modules refer to a global variable as an attribute.
    variables = {name for kind, name in only if kind is ast.Name and (ast.Attribute, name) not in used}
    return attributes, variables


def find_changes(files: Iterable[Path], directory: Path) -> dict[str, str]:
    """Return where attributes and variables change after they were made, by name, as ``"file:line"``."""
    found: dict[str, str] = {}
    for file in files:
        shown = _shown(file, directory)
        tree = _parsed(file) or ast.Module([], [])
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        for node in (node for method in methods for node in ast.walk(method)):
            for name in _changed_by(node):
                found.setdefault(name, f"{shown}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def find_deciding(files: Iterable[Path]) -> set[str]:
    """Return the names that a condition for more than messages reads, or that an evaluation returns as metrics."""
    nodes = [node for file in files if (tree := _parsed(file)) is not None for node in ast.walk(tree)]
    read: list[ast.AST] = [node.test for node in nodes if isinstance(node, ast.IfExp)]
    for node in nodes:
        if isinstance(node, ast.If | ast.While):
            own = _names_read(node.test)
            if not all(_only_reports(statement, own) for statement in [*node.body, *node.orelse]):
                read.append(node.test)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("evaluate_"):
            read += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
    return set().union(*map(_names_read, read))


def _names_read(tree: ast.AST) -> set[str]:
    return {name_of(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}


def _only_reports(statement: ast.stmt, own: set[str]) -> bool:
    """Return whether a statement only writes a message, or assigns to one of its condition's ``own`` names."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return name_of(statement.value.func).startswith(_REPORTING)
    if isinstance(statement, ast.Assign):
        return all(name_of(target) in own for target in statement.targets)
    if isinstance(statement, ast.For | ast.With):
        return all(_only_reports(inner, own) for inner in statement.body)
    return isinstance(statement, ast.Pass)


def _changed_by(node: ast.AST) -> Iterator[str]:
    """Yield the names of what a statement assigns to, or calls a method of."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        targets = [node.value.func.value] if isinstance(node.value.func, ast.Attribute) else []
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Attribute | ast.Name):
                yield name_of(part)


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
        return name_of(value.func) in _NEW_CONTAINERS
    return isinstance(value, ast.List | ast.ListComp | ast.Dict)
