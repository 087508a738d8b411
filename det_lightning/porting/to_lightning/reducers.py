"""Reducers of a trial, which Determined reset and reduced, reset and reduced by hooks of the module."""

from __future__ import annotations

import ast
import dataclasses

from det_lightning.porting.to_lightning.shape import TrialShape, argument
from det_lightning.porting.to_lightning.source import Source, attribute_of_self, dotted

_COLLECTED = '''\
class CollectedValues:
    """Keeps values, and computes a metric from all of them."""

    def __init__(self, reduce):
        self.reduce = reduce
        self.reset()

    def reset(self):
        self.values = []

    def update(self, value):
        self.values.append(value)

    def compute(self):
        return self.reduce(self.values)


'''


@dataclasses.dataclass(frozen=True)
class _Reducer:
    holder: str
    name: str
    is_function: bool

    def log_line(self) -> str:
        held = f"self.{self.holder}"
        value = f"{held}.compute()" if self.is_function else f"{held}.cross_slot_reduce([{held}.per_slot_reduce()])"
        return f"self.log({self.name}, float({value}))" if self.name else f"self.log_dict({value})"


def rewrite_reducers(source: Source, shape: TrialShape) -> list[list[str]]:
    """Rewrite what was wrapped with ``wrap_reducer``; return the hooks that use it, each a list of lines."""
    functions = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)}
    found = [_rewrite(source, call, functions) for call in shape.context_calls("wrap_reducer")]
    reducers = [reducer for reducer in found if reducer is not None]
    if any(reducer.is_function for reducer in reducers):
        source.insert_before(shape.definition, _COLLECTED)
    _rewrite_bases(source)
    if not reducers:
        return []
    source.todos += 1
    return [
        ["def on_validation_epoch_start(self):", *(f"    self.{reducer.holder}.reset()" for reducer in reducers)],
        [
            "def on_validation_epoch_end(self):",
            "    # TODO: these are of one process; use torchmetrics for several, and in training steps",
            *(f"    {reducer.log_line()}" for reducer in reducers),
        ],
    ]


def _rewrite(source: Source, call: ast.Call, functions: set[str]) -> _Reducer | None:
    reducer = argument(call, 0, "reducer")
    name = argument(call, 1, "name")
    statement = source.parent(call)
    holder = attribute_of_self(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    is_function = isinstance(reducer, ast.Lambda) or dotted(reducer).rpartition(".")[2] in functions
    if reducer is None or not holder or not (is_function or isinstance(reducer, ast.Call)):
        source.note(call, "use a metric of torchmetrics; reset, update and log it in the hooks of this module")
        is_function = False
        holder = ""
    if reducer is not None:
        (start, end) = source.span(call)
        (first, last) = source.span(reducer)
        source.edits.rewrite(start, first, "CollectedValues(" if is_function else "")
        source.edits.rewrite(last, end, ")" if is_function else "")
    has_name = name is not None and not (isinstance(name, ast.Constant) and name.value is None)
    return _Reducer(holder, source.render(name) if has_name and name else "", is_function) if holder else None


def _rewrite_bases(source: Source) -> None:
    """Let classes that derive from ``MetricReducer`` derive from nothing."""
    for definition in ast.walk(source.tree):
        bases = definition.bases if isinstance(definition, ast.ClassDef) else []
        if len(bases) == 1 and dotted(bases[0]).rpartition(".")[2] == "MetricReducer":
            start, end = source.span(bases[0])
            source.edits.rewrite(source.text.rindex("(", 0, start), source.text.index(")", end) + 1, "")
