"""Searches a trial's source for bypasses of the context, hyperparameters, and lines that explain a failed check."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from det_lightning.porting.bypass_rules import find_bypasses, get_name, parse

_LISTED = 8
_BATCH_SIZES = {"get_per_slot_batch_size", "get_global_batch_size"}
_INDICES = ("batch_idx", "epoch_idx", "current_train_batch", "current_train_epoch")
# An unseeded generator of torch always has the same seed.
_GENERATORS = {"default_rng", "RandomState", "Random", "SystemRandom", "seed"}
_CHANCES = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "now", "urandom", "uuid4", "getpid"}
_CHANCE_MODULES = ("time", "os.", "uuid", "datetime", "urandom", "getpid", "perf_counter")
_MOVING = ("to", "to_device", "cuda", "register_buffer", "type_as")
_FACTORIES = (
    "tensor",
    "as_tensor",
    "from_numpy",
    "zeros",
    "ones",
    "full",
    "eye",
    "arange",
    "linspace",
    "rand",
    "randn",
)
# Methods that return Python's or NumPy's values.
_PLAIN = ("tolist", "item", "numpy")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_VIEWS = ("detach", "view", "flatten")
_REPORTING = ("print", "log", "debug", "info", "warning", "write", "add_", "set_postfix", "flush")

Test = Callable[[ast.AST], bool]


class TrialCode:
    """The parsed source of a trial; ``directory`` shortens the names of ``files``. Unreadable files are left out."""

    def __init__(self, files: Iterable[Path], directory: Path) -> None:
        self._trees: dict[Path, ast.Module] = {}
        for file in files:
            try:
                tree = parse(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
            self._trees[file.relative_to(directory) if file.is_relative_to(directory) else file] = tree

    def find(self, *tests: Test) -> list[str]:
        """Return up to eight nodes that pass a test, as ``"file:line: code"``; parts for scripts only do not count."""
        found = {
            f"{line}: {ast.unparse(node).partition(chr(10))[0]}": None
            for line, node in self._nodes()
            if any(test(node) for test in tests)
        }
        return [*found][:_LISTED]

    def find_bypasses(self, kind: str) -> list[str]:
        """Return bypasses of the context, as ``"file:line: code"``; naming the current GPU is not one."""
        return [
            f"{file}:{found.line}: {found.code}"
            for file, tree in self._trees.items()
            for found in find_bypasses(tree, _find_script_parts(tree))
            if found.kind == kind and not found.follows_availability
        ]

    def find_hparams(self) -> dict[str, str]:
        """Return the hyperparameters that the code names, with the first line of each."""
        found: dict[str, str] = {}
        for line, node in self._nodes():
            name = get_name(node.func) if isinstance(node, ast.Call) else ""
            if name in _BATCH_SIZES:
                found.setdefault("global_batch_size", line)
            elif isinstance(node, ast.Call | ast.Subscript) and (requested := _find_requested_hparam(node)):
                found.setdefault(requested, line)
        return found

    def find_changes(self, within: tuple[str, ...] = ("",)) -> dict[str, str]:
        """Return the first line that changes each ``.attribute`` or ``variable``, else the first assignment.

        Only functions whose names begin with ``within`` are searched.
        """
        made: dict[str, str] = {}
        changed: dict[str, str] = {}
        for file, tree in self._trees.items():
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for function in (function for function in functions if function.name.startswith(within)):
                lines = made if function.name == "__init__" else changed
                for name, number in itertools.chain.from_iterable(map(_find_targets, ast.walk(function))):
                    lines.setdefault(name, f"{file}:{number}")
        return made | changed

    def find_deciding(self) -> set[str]:
        """Return the names on which validation metrics and decisions, other than about messages, depend."""
        nodes = [node for tree in self._trees.values() for node in ast.walk(tree)]
        read: list[ast.AST] = []
        reported = _find_reported(nodes)
        for node in nodes:
            if isinstance(node, ast.If | ast.While):
                branches = [*node.body, *node.orelse]
                own = _read_names(node.test)
                if not all(_only_reports(statement, own, reported) for statement in branches):
                    read.append(_leave_out_cache(node.test, branches))
            elif isinstance(node, ast.stmt):
                own_parts = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))
                tests = [p.test for child in own_parts for p in ast.walk(child) if isinstance(p, ast.IfExp)]
                read += [test for test in tests if not _only_reports(node, _read_names(test), reported)]
            if isinstance(node, ast.FunctionDef) and node.name.startswith("evaluate_"):
                read += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
        return set().union(*map(_read_names, read))

    def find_late_changes(self) -> list[str]:
        """Return changes of ``.grad`` in place behind all steps and backward passes of a function that has steps."""
        found = []
        for file, tree in self._trees.items():
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                nodes = [node for node in ast.walk(function) if isinstance(node, ast.expr | ast.stmt)]
                calls_last = [node for node in nodes if _is_call(node, ("step_optimizer", "backward"))]
                last = max((node.end_lineno or 0 for node in calls_last), default=0)
                is_stepping = any(_is_call(node, ("step_optimizer",)) for node in nodes)
                late = [node for node in nodes if is_stepping and node.lineno > last and _changes_gradient(node)]
                found += [f"{file}:{node.lineno}: {ast.unparse(node)}" for node in late]
        return [*dict.fromkeys(found)]

    def find_chances(self) -> list[str]:
        """Return generators without a seed, clocks and the like, except those for messages only."""
        statements = [n for tree in self._trees.values() for n in ast.walk(tree) if isinstance(n, ast.stmt)]
        reported = _find_reported(statements)
        messages = {
            part
            for statement in statements
            if isinstance(statement, ast.Assign | ast.Expr) and _only_reports(statement, set(), reported)
            for part in ast.walk(statement)
        }
        return self.find(lambda node: may_be_unseeded(node) and node not in messages)

    def find_counts_in_epoch(self) -> list[str]:
        """Return comparisons that take ``batch_idx`` for an index in the epoch, which it is only in validations."""
        functions = [n for tree in self._trees.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        evaluations = [function for function in functions if function.name.startswith("evaluate_")]
        evaluated = {part for function in evaluations for part in ast.walk(function)}
        return self.find(lambda node: _counts_in_epoch(node) and node not in evaluated)

    def find_unmoved(self) -> list[str]:
        """Return tensors that a trial makes on the CPU, keeps in an attribute and uses, but never moves to a device."""
        nodes = [node for tree in self._trees.values() for node in ast.walk(tree)]
        moved = {_mark_name(part) for node in nodes if _is_call(node, _MOVING) for part in ast.walk(node)}
        users = [n for n in nodes if isinstance(n, ast.FunctionDef) and not n.name.startswith(("__init__", "build_"))]
        plain = {node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in _PLAIN}
        parts = (part for user in users for part in ast.walk(user) if part not in plain)
        used = set(map(_mark_name, parts)) - moved
        return [
            f"{file}:{node.lineno}: {ast.unparse(node)}"
            for file, tree in self._trees.items()
            for node in _find_kept_tensors(tree)
            if not used.isdisjoint(map(_mark_name, node.targets))
        ]

    def _nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """Yield expressions and functions with their lines, except in parts for scripts only."""
        for file, tree in self._trees.items():
            for node in _walk(tree, _find_script_parts(tree)):
                if isinstance(node, ast.expr | ast.FunctionDef):
                    yield f"{file}:{node.lineno}", node


def _find_kept_tensors(tree: ast.AST) -> Iterator[ast.Assign]:
    """Yield what a trial's class assigns to attributes, if it makes a tensor."""
    for trial in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if any(map(defines("train_batch"), trial.body)):
            kept = (node for node in ast.walk(trial) if isinstance(node, ast.Assign) and _makes_tensor(node.value))
            yield from (node for node in kept if isinstance(node.targets[0], ast.Attribute))


def _walk(tree: ast.AST, left_out: set[ast.AST]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if child not in left_out:
            yield child
            yield from _walk(child, left_out)


def _find_script_parts(tree: ast.Module) -> set[ast.AST]:
    """Return the ``if __name__ == "__main__"`` blocks, and functions that only these blocks name."""
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    called = set().union(*map(_read_names, guards))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in called}
    parts: set[ast.AST] = {*guards, *functions.values()}
    elsewhere = set().union(*(_read_names(node) for node in tree.body if node not in parts))
    return parts - {node for name, node in functions.items() if name in elsewhere}


def _find_requested_hparam(node: ast.Call | ast.Subscript) -> str | None:
    """Return the name in ``get_hparam("name")``, or in ``hparams["name"]`` for a variable that is called so."""
    if isinstance(node, ast.Call):
        argument = node.args[0] if get_name(node.func) == "get_hparam" and node.args else None
    else:
        holder = get_name(node.value.func if isinstance(node.value, ast.Call) else node.value).lower()
        is_read = isinstance(node.ctx, ast.Load) and ("hparams" in holder or "hyperparam" in holder)
        argument = node.slice if is_read else None
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None


def _read_names(tree: ast.AST) -> set[str]:
    return {get_name(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}


def _find_reported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return each ``.attribute`` and ``variable`` that is read only for messages, directly or through others."""
    reads: list[tuple[set[str], set[str]]] = []  # the names that a statement assigns and reads; "" for other purposes
    for node in (node for node in nodes if isinstance(node, ast.stmt)):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            reads.append((set(map(_mark_name, targets)), set(map(_mark_name, ast.walk(node.value))) - {""}))
        else:
            own = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))
            names = {_mark_name(part) for child in own for part in ast.walk(child)}
            reads.append((set() if _is_message(node) else {""}, names - {""}))
    used = {""}
    while not used >= (more := set().union(*(names for assigned, names in reads if assigned & used))):
        used |= more
    return set().union(*(names for _, names in reads)) - used


def _mark_name(node: ast.AST) -> str:
    """Return ``.attribute`` or ``variable``; empty for other nodes."""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else get_name(node)


def _leave_out_cache(test: ast.expr, branches: list[ast.stmt]) -> ast.expr:
    """Return a condition; of one that looks up a key in a cache that its branches read or fill, only the key."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.In | ast.NotIn):
        return test
    parts = (part for statement in branches for part in ast.walk(statement) if isinstance(part, ast.Subscript))
    return test.left if get_name(test.comparators[0]) in {get_name(part.value) for part in parts} - {""} else test


def _is_message(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Call) and get_name(value.func).startswith(_REPORTING)


def _only_reports(statement: ast.stmt, own: set[str], reported: set[str]) -> bool:
    """Return whether a statement only writes a message, or assigns to names ``own`` to messages and conditions."""
    if isinstance(statement, ast.Assign):
        return all(_mark_name(target) in reported or get_name(target) in own for target in statement.targets)
    if isinstance(statement, ast.For | ast.With):
        return all(_only_reports(inner, own, reported) for inner in statement.body)
    return isinstance(statement, ast.Pass) or _is_message(statement)


def _find_targets(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what a statement assigns to or calls a method of (other than ``eval()``), with the line."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        targets = [function.value] if isinstance(function, ast.Attribute) and function.attr != "eval" else []
    for part in (part for target in targets for part in ast.walk(target)):
        if isinstance(part, ast.Attribute | ast.Name):
            yield _mark_name(part), node.lineno  # type: ignore[attr-defined]


def _is_call(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, ast.Call) and get_name(node.func) in names


def _is_gradient(node: ast.AST) -> bool:
    """Return whether an expression is ``.grad``, or a part or view of it, rather than a copy or a new tensor."""
    if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        return _is_gradient(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
        return _is_gradient(node.func.value)
    return get_name(node) == "grad"


def _makes_tensor(node: ast.AST) -> bool:
    """Return whether a call of torch makes a tensor on the CPU; not a single number, which works on any device."""
    if not isinstance(node, ast.Call) or any(given.arg == "device" for given in node.keywords):
        return False
    is_number = get_name(node.func) in ("tensor", "as_tensor") and isinstance(next(iter(node.args), None), ast.Constant)
    of_torch = isinstance(node.func, ast.Attribute) and get_name(node.func.value) == "torch"
    return of_torch and _is_call(node, _FACTORIES) and not is_number


def _changes_gradient(node: ast.AST) -> bool:
    """Return whether a node changes or replaces ``.grad`` other than by clearing it."""
    if isinstance(node, ast.Call):
        name = get_name(node.func)
        is_foreach = name.startswith("_foreach_") and any("grad" in ast.unparse(given) for given in node.args)
        of_gradient = isinstance(node.func, ast.Attribute) and _is_gradient(node.func.value)
        return name.endswith("_") and "zero" not in name and (is_foreach or of_gradient)
    if isinstance(node, ast.AugAssign):
        return get_name(node.target) == "grad"
    is_cleared = isinstance(node, ast.Assign) and (isinstance(node.value, ast.Constant) or _is_call(node.value, _ZEROS))
    return isinstance(node, ast.Assign) and not is_cleared and any(get_name(t) == "grad" for t in node.targets)


def _counts_in_epoch(node: ast.AST) -> bool:
    """Return whether a comparison takes ``batch_idx`` for an index in the epoch: with 0 or with the length of data."""
    if not isinstance(node, ast.Compare) or any(isinstance(part, ast.Mod) for part in ast.walk(node)):
        return False
    sides = (node.left, *node.comparators)
    ends = [getattr(side, "value", None) == 0 or any(_is_call(p, ("len",)) for p in ast.walk(side)) for side in sides]
    return any(ends) and any(get_name(part) == "batch_idx" for side in sides for part in ast.walk(side))


# Tests for TrialCode.find()


def reads_rank(node: ast.AST) -> bool:
    """Return whether a node asks for the rank of this process."""
    if isinstance(node, ast.Constant):
        return node.value in ("RANK", "LOCAL_RANK")
    return isinstance(node, ast.Attribute) and node.attr in ("rank", "get_rank", "local_rank")


def scales_by_size(node: ast.AST) -> bool:
    """Return whether a node computes with the number of processes, or with the batch size of one process."""
    names = ("size", "get_size", "get_per_slot_batch_size")
    is_size = (get_name(part) in names and isinstance(part, ast.Attribute) for part in ast.walk(node))
    return isinstance(node, ast.BinOp) and any(is_size)


def makes_sum(node: ast.AST) -> bool:
    """Return whether a node sums all elements of a tensor, such as ``loss.sum()`` and ``reduction="sum"``."""
    if not isinstance(node, ast.Call):
        return False
    by_name = any(isinstance(k.value, ast.Constant) and k.value.value == "sum" for k in node.keywords)
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "sum"
    return by_name or (is_method and not node.args and not node.keywords)


def depends_on_hash(node: ast.AST) -> bool:
    """Return whether a node makes a set, or asks for a hash."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "hash")
    return is_call or isinstance(node, ast.Set | ast.SetComp)


def may_be_unseeded(node: ast.AST) -> bool:
    """Return whether a call makes a generator without a seed, or reads a clock or another source of chance."""
    if not isinstance(node, ast.Call):
        return False
    is_unseeded = get_name(node.func) in _GENERATORS and not (node.args or node.keywords)
    return is_unseeded or (get_name(node.func) in _CHANCES and ast.unparse(node.func).startswith(_CHANCE_MODULES))


def compares_index(node: ast.AST) -> bool:
    """Return whether an expression decides by the index of a batch or epoch."""
    if not (isinstance(node, ast.Compare) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))):
        return False
    return any(get_name(part).startswith(_INDICES) for part in ast.walk(node))


def sizes_batch(node: ast.AST) -> bool:
    """Return whether a call makes a loader with a batch size, or asks for the global batch size."""
    if not isinstance(node, ast.Call):
        return False
    return get_name(node.func) == "get_global_batch_size" or any(given.arg == "batch_size" for given in node.keywords)


def assigns(name: str) -> Test:
    """Return a test for assignments of an attribute or variable."""
    return lambda node: get_name(node) == name and isinstance(getattr(node, "ctx", None), ast.Store)


def calls(name: str) -> Test:
    """Return a test for calls of a function or method."""
    return lambda node: isinstance(node, ast.Call) and get_name(node.func) == name


def defines(name: str) -> Test:
    """Return a test for the definition of a function or method."""
    return lambda node: isinstance(node, ast.FunctionDef) and node.name == name


def is_text(text: str) -> Test:
    """Return a test for a string, such as the name of a metric."""
    return lambda node: isinstance(node, ast.Constant) and node.value == text


def is_attribute(name: str) -> Test:
    """Return a test for an attribute, such as a member of an enumeration."""
    return lambda node: isinstance(node, ast.Attribute) and node.attr == name
