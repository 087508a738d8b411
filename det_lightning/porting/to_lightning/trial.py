"""What a trial is made of: its context, what it wraps, and members, some of whose names Lightning has for itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, last_name, methods_of, targets_of
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self

# Of LightningModule; what a trial calls so gets another name.
_RESERVED = re.compile(
    "all_gather|automatic_optimization|backward|clip_gradients|configure_callbacks|configure_gradient_clipping"
    "|configure_model|configure_optimizers|current_epoch|device|device_mesh|dtype|example_input_array|fabric|freeze"
    "|global_rank|global_step|hparams_initial|local_rank|log|log_dict|logger|loggers|lr_scheduler_step|lr_schedulers"
    "|manual_backward|on_gpu|optimizer_step|optimizer_zero_grad|optimizers|prepare_data|print|setup|strict_loading"
    "|teardown|to|trainer|training|training_step|type|validation_step"
)


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A wrapped learning rate scheduler."""

    name: str  # the attribute that holds it
    mode: str  # empty if the code does not say
    frequency: str  # as code


class Trial:
    """Finds in a trial what the context is called and what was wrapped with it."""

    def __init__(self, file: ModuleFile, definition: cst.ClassDef) -> None:
        self.file = file
        self.definition = definition
        self.methods = {method.name.value: method for method in methods_of(definition)}
        init = self.methods.get("__init__")
        parameters = [] if init is None else parameters_of(init)
        self._context_parameter = parameters[1].name.value if len(parameters) > 1 else ""
        self._context_attributes = {
            name for name, value in self._assignments() if dotted_name(value) == self._context_parameter != ""
        }
        self.optimizers: list[str] = []  # the attributes that hold them; with * before one that holds several
        self.schedulers: list[Scheduler] = []
        for call in self.context_calls("wrap_optimizer"):
            self._add_optimizer(call)
        for call in self.context_calls("wrap_lr_scheduler"):
            self._add_scheduler(call)

    def _assignments(self) -> Iterator[tuple[str, cst.BaseExpression]]:
        """Yield the attributes of ``self`` that are assigned, and what to."""
        for statement in self.file.find(cst.Assign, cst.AnnAssign, within=self.definition):
            for target in targets_of(statement):
                if (name := attribute_of_self(target)) and statement.value is not None:
                    yield name, statement.value

    def assigned(self) -> set[str]:
        return {name for name, _ in self._assignments()}

    def is_context(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Name):
            in_init = self.file.function(node) is self.methods.get("__init__")
            return node.value == self._context_parameter and in_init
        return attribute_of_self(node) in self._context_attributes

    def context_calls(self, method: str) -> Iterator[cst.Call]:
        for call in self.file.find(cst.Call, within=self.definition):
            called = call.func
            if isinstance(called, cst.Attribute) and called.attr.value == method and self.is_context(called.value):
                yield call

    def _holders(self, call: cst.Call) -> list[str]:
        """Return the attributes that a wrapped object is kept in, with ``*`` before one that holds several."""
        statement = self.file.statement(call)
        if isinstance(statement, cst.Return):  # of a method: what keeps its result
            function = self.file.function(call)
            return [
                name
                for name, value in self._assignments()
                if function and isinstance(value, cst.Call) and attribute_of_self(value.func) == function.name.value
            ]
        if not isinstance(statement, cst.Assign | cst.AnnAssign):
            return []
        target = targets_of(statement)[0]
        if statement.value is call and isinstance(target, cst.Name):
            return [name for name, value in self._assignments() if dotted_name(value) == target.value][:1]
        name = attribute_of_self(target)
        return [name if statement.value is call else f"*{name}"] if name else []

    def _add_optimizer(self, call: cst.Call) -> None:
        holders = self._holders(call)
        if not holders:
            advice = "configure_optimizers() must return this optimizer too; keep it in an attribute"
            self.file.todo(call, advice)
        self.optimizers += [holder for holder in holders if holder not in self.optimizers]

    def _add_scheduler(self, call: cst.Call) -> None:
        holders = self._holders(call)
        if not holders or any(holder.startswith("*") for holder in holders):
            advice = "step this scheduler in on_train_batch_end(), and return it from configure_optimizers()"
            self.file.todo(call, advice)
            return
        mode = last_name(argument(call, 1, "step_mode"))
        frequency = argument(call, 2, "frequency")
        text = "1" if frequency is None else self.file.source(frequency)
        self.schedulers += [Scheduler(holder, mode, text) for holder in holders]


def parameters_of(function: cst.FunctionDef) -> list[cst.Param]:
    """Return the parameters that can be passed by position."""
    return [*function.params.posonly_params, *function.params.params]


def rename_members(trial: Trial, names: dict[str, str]) -> None:
    """Rename the class of the trial and methods to ``names``, and members whose names Lightning needs."""
    file = trial.file
    own = trial.assigned() | set(trial.methods)
    members = {name: f"trial_{name}" for name in own if _RESERVED.fullmatch(name)} | names
    trial.schedulers[:] = [
        dataclasses.replace(scheduler, name=_renamed(scheduler.name, members)) for scheduler in trial.schedulers
    ]
    trial.optimizers[:] = [_renamed(name, members) for name in trial.optimizers]
    for attribute in file.find(cst.Attribute, within=trial.definition):
        if attribute_of_self(attribute) in members:
            file.replace(attribute.attr, members[attribute.attr.value])
    in_class = set(file.names(within=trial.definition))
    for name in file.names():
        if name.value == trial.definition.name.value or (name.value in names and name in in_class):
            file.replace(name, names[name.value])
    for method in trial.methods.values():
        if method.name.value in members:
            file.replace(method.name, members[method.name.value])


def _renamed(name: str, members: dict[str, str]) -> str:
    star = "*" if name.startswith("*") else ""
    return star + members.get(name.removeprefix("*"), name.removeprefix("*"))


def drop_own_hparams(trial: Trial) -> None:
    """Remove ``self.hparams = ...`` where that is what Lightning's ``hparams`` is; otherwise call it differently."""
    statements = [
        node
        for node in trial.file.find(cst.Assign, within=trial.definition)
        if any(attribute_of_self(target) == "hparams" for target in targets_of(node))
    ]
    if all(_is_same(trial, node.value) for node in statements):
        for node in statements:
            trial.file.replace_statement(node, [])
        return
    for attribute in trial.file.find(cst.Attribute, within=trial.definition):
        if attribute_of_self(attribute) == "hparams":
            trial.file.replace(attribute, "self.trial_hparams")


def _is_same(trial: Trial, value: cst.BaseExpression) -> bool:
    """Return whether a value holds the hyperparameters as they are; Lightning's have attributes too."""
    if not isinstance(value, cst.Call):
        return dotted_name(value) == "hparams"
    if len(value.args) == 1 and value.args[0].keyword is None and "ict" in dotted_name(value.func):
        return _is_same(trial, value.args[0].value)
    called = value.func
    return isinstance(called, cst.Attribute) and called.attr.value == "get_hparams" and trial.is_context(called.value)
