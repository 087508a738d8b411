"""Reducers of a trial: hooks of the module reset and reduce them, as Determined did."""

from __future__ import annotations

import dataclasses

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, last_name
from det_lightning.porting.to_lightning.module_file import argument
from det_lightning.porting.to_lightning.trial import Trial

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


_OF_ONE_PROCESS = "these are of one process; use torchmetrics for several, and in training steps"


@dataclasses.dataclass(frozen=True)
class _Reducer:
    holder: str
    name: str
    is_function: bool
    for_validation: bool

    def log_line(self) -> str:
        held = f"self.{self.holder}"
        value = f"{held}.compute()" if self.is_function else f"{held}.cross_slot_reduce([{held}.per_slot_reduce()])"
        return f"self.log({self.name}, float({value}))" if self.name else f"self.log_dict({value})"


def rewrite_reducers(trial: Trial) -> list[list[str]]:
    """Rewrite what was wrapped with ``wrap_reducer``; return the hooks that use it, each as a list of lines."""
    file = trial.file
    functions = {function.name.value for function in file.find(cst.FunctionDef)}
    found = [_rewrite(trial, call, functions) for call in trial.context_calls("wrap_reducer")]
    reducers = [reducer for reducer in found if reducer is not None]
    if any(reducer.is_function for reducer in reducers):
        file.edits.insert(file.edits.offset(file.first_line(trial.definition), 0), _COLLECTED, first=True)
    for definition in file.find(cst.ClassDef):
        if len(definition.bases) == 1 and last_name(definition.bases[0].value) == "MetricReducer":
            start, end = file.span(definition.bases[0].value)
            file.edits.replace(file.text.rindex("(", 0, start), file.text.index(")", end) + 1, "")
    reducers = [reducer for reducer in reducers if reducer.for_validation]
    if not reducers:
        return []
    return [
        ["def on_validation_epoch_start(self):", *(f"    self.{reducer.holder}.reset()" for reducer in reducers)],
        [
            "def on_validation_epoch_end(self):",
            f"    {file.todo_line(_OF_ONE_PROCESS)}",
            *(f"    {reducer.log_line()}" for reducer in reducers),
        ],
    ]


def _rewrite(trial: Trial, call: cst.Call, functions: set[str]) -> _Reducer | None:
    reducer = argument(call, 0, "reducer")
    name = argument(call, 1, "name")
    statement = trial.file.parent(call)
    holder = trial.file.attribute_as_written(statement.targets[0].target) if isinstance(statement, cst.Assign) else ""
    for_validation = dotted_name(argument(call, 3, "for_validation")) != "False"
    if not for_validation:
        trial.file.todo(call, "reset this reducer in training, and log what it reduces to")
    is_function = isinstance(reducer, cst.Lambda) or last_name(reducer) in functions
    if reducer is None or not holder or not (is_function or isinstance(reducer, cst.Call)):
        trial.file.todo(call, "use a metric of torchmetrics; reset, update and log it in the hooks of this module")
        is_function = False
        holder = ""
    if reducer is not None:
        trial.file.replace_around(call, reducer, "CollectedValues(" if is_function else "", ")" if is_function else "")
    if not holder:
        return None
    written = "" if name is None or dotted_name(name) == "None" else trial.file.render(name)
    return _Reducer(holder, written, is_function, for_validation)
