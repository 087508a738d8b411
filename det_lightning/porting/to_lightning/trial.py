"""The parts of a trial: context, methods, and wrapped models, optimizers and schedulers.

A holder spells where a wrapped object is, as an item of a list: ``self.x`` for an attribute, ``*self.x`` for one that
holds several objects, ``*self.x.values()`` for one that holds them by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, last_name, list_methods, list_parameters, list_targets
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self

_ATTRIBUTE = re.compile(r"(?<=self\.)\w+")
_SEVERAL = (cst.List, cst.ListComp, cst.Tuple, cst.Set, cst.GeneratorExp)
_BY_NAME = (cst.Dict, cst.DictComp)
_MODULES = ("ModuleList", "ModuleDict", "Sequential")
_CONTAINERS = (*_MODULES, "list", "tuple")
_Assignments = list[tuple[str, cst.BaseExpression]]


@dataclasses.dataclass
class Scheduler:
    """A wrapped learning rate scheduler."""

    holder: str  # see _find_holders()
    mode: str  # empty if the code does not say, or says several
    frequency: cst.BaseExpression | None
    every: str = "1"  # the frequency as written


class Trial:
    """Finds the names of the context and the holders of wrapped objects in a trial."""

    def __init__(self, file: ModuleFile, definition: cst.ClassDef) -> None:
        self.file = file
        self.definition = definition
        self.methods = {method.name.value: method for method in list_methods(definition)}
        init = self.methods.get("__init__")
        parameters = [] if init is None else list_parameters(init)
        self.context_parameter = parameters[1].name.value if len(parameters) > 1 else ""
        self.context_attributes: set[str] = set()  # attributes of self with the context
        # The parameters and assignments of variables with the context.
        self._context_variables: set[cst.CSTNode] = {*parameters[1:2]}
        self._find_contexts()
        self._called_by_init = self.find_reached("__init__")
        self.properties: dict[str, list[str]] = {}  # the lines of properties by name
        self.finds_optimizers = False  # a step looks up Lightning's optimizer for the trial's
        # The holders; see _find_holders().
        self.models: list[str] = []
        self.optimizers: list[str] = []
        self.schedulers: list[Scheduler] = []
        self._find_models()
        self._find_optimizers()
        self._find_schedulers()

    def assignments(self) -> Iterator[tuple[str, cst.BaseExpression]]:
        """Yield the assigned attributes of ``self``, and the values."""
        for statement in self.file.find(cst.Assign, cst.AnnAssign, within=self.definition):
            for target in list_targets(statement):
                if (name := attribute_of_self(target)) and statement.value is not None:
                    yield name, statement.value

    def find_uses(self, attribute: str) -> list[cst.Attribute]:
        """Return where an attribute of ``self`` is named, including assignments."""
        found = self.file.find(cst.Attribute, within=self.definition)
        return [node for node in found if attribute_of_self(node) == attribute]

    def _find_contexts(self) -> None:
        """Find the variables and attributes that hold the context, also through other variables."""
        known = -1
        while (found := len(self._context_variables) + len(self.context_attributes)) > known:
            known = found
            statements = self.file.find(cst.Assign, cst.AnnAssign, within=self.definition)
            of_context = [one for one in statements if one.value is not None and self.is_context(one.value)]
            for target in itertools.chain.from_iterable(map(list_targets, of_context)):
                if isinstance(target, cst.Name):
                    self._context_variables.add(target)
                elif name := attribute_of_self(target):
                    self.context_attributes.add(name)
        if not self.context_attributes and self.find_uses("context"):  # set by a base class of another file
            self.context_attributes.add("context")

    def is_context(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the context, and cannot be anything else."""
        if isinstance(node, cst.Name):
            assigned = set(self.file.assignments(node))
            return bool(assigned) and assigned <= self._context_variables
        return attribute_of_self(node) in self.context_attributes

    def context_calls(self, *methods: str) -> Iterator[cst.Call]:
        for call in self.file.find(cst.Call, within=self.definition):
            called = call.func
            if isinstance(called, cst.Attribute) and called.attr.value in methods:
                base = called.value
                if isinstance(base, cst.Attribute) and base.attr.value in ("experimental", "distributed"):
                    base = base.value
                if self.is_context(base):
                    yield call

    def calls_context(self, *methods: str) -> bool:
        return next(self.context_calls(*methods), None) is not None

    def uses_amp(self) -> bool:
        return self.calls_context("use_amp", "wrap_scaler", "configure_apex_amp")

    def runs_before_training(self, node: cst.CSTNode) -> bool:
        """Return whether code is run by ``__init__``, when there is no trainer yet."""
        return any(outer in self._called_by_init for outer in self.file.ancestors(node))

    def find_reached(self, name: str) -> set[cst.FunctionDef]:
        """Return a method, and all methods named by it, directly or indirectly."""
        found = [self.methods[name]] if name in self.methods else []
        for method in found:  # grows
            names = map(attribute_of_self, self.file.find(cst.Attribute, within=method))
            found += [self.methods[one] for one in {*names} & self.methods.keys() if self.methods[one] not in found]
        return set(found)

    def _find_wrapped(self, method: str, advice: str) -> Iterator[tuple[cst.Call, list[str]]]:
        """Yield the calls of a method with the holders of the results; note missing and conditional holders."""
        assigned = list(self.assignments())
        calls = [(call, _find_holders(self.file, call, assigned)) for call in self.context_calls(method)]
        held = [holder for _, holders in calls for holder in holders if not holder.startswith("*")]
        unset = {f"self.{name}" for name, value in assigned if dotted_name(value) == "None"}
        for call, holders in calls:
            if not holders:
                self.file.todo(call, advice)
            is_conditional = any(isinstance(outer, cst.If | cst.IfExp) for outer in self.file.ancestors(call))
            for holder in holders:
                if holder in unset or (is_conditional and held.count(holder) == 1):
                    self.file.todo(call, f"the hooks below must leave {holder} out where it is not set")
            yield call, holders

    def _find_models(self) -> None:
        advice = "keep this model in an attribute: Lightning saves, moves and counts no other models"
        for call, holders in self._find_wrapped("wrap_model", advice):
            outer = [node for node in self.file.ancestors(call) if isinstance(node, cst.Call)]
            is_in_module = any(last_name(node.func) in _MODULES for node in outer)
            if any(holder.startswith("*") for holder in holders) and not is_in_module:
                listed = "keep these models in a torch.nn.ModuleList: Lightning saves and moves no other lists"
                self.file.todo(call, listed)
            self.models += [holder for holder in holders if holder not in self.models]

    def _find_optimizers(self) -> None:
        advice = "configure_optimizers() must return this optimizer too; keep it in an attribute"
        for _, holders in self._find_wrapped("wrap_optimizer", advice):
            self.optimizers += [holder for holder in holders if holder not in self.optimizers]

    def _find_schedulers(self) -> None:
        advice = "step this scheduler in on_train_batch_end(), and return it from configure_optimizers()"
        for call, holders in self._find_wrapped("wrap_lr_scheduler", advice):
            frequency = argument(call, 2, "frequency")
            if holders and frequency is not None and self._is_local(frequency):
                self.file.todo(call, "on_train_batch_end() needs the frequency: keep it in an attribute")
            given = argument(call, 1, "step_mode")
            modes = [] if given is None else self.file.find_values(given)
            mode = last_name(modes[0]) if len(modes) == 1 else ""
            every = "1" if frequency is None else self.file.source(frequency)
            for holder in holders:
                self._add_scheduler(Scheduler(holder, mode, frequency, every))

    def _add_scheduler(self, found: Scheduler) -> None:
        """Note a scheduler, without a mode if an earlier call with the same holder gives another."""
        known = next((one for one in self.schedulers if one.holder == found.holder), None)
        if known is None:
            self.schedulers.append(found)
        elif (known.mode, known.every) != (found.mode, found.every):
            known.mode = ""

    def render_frequencies(self) -> None:
        """Keep the rewritten frequencies of schedulers before the wrapping calls are removed."""
        for scheduler in self.schedulers:
            if scheduler.frequency is not None:
                scheduler.every = self.file.render(scheduler.frequency)

    def _is_local(self, value: cst.BaseExpression) -> bool:
        """Return whether an expression names a variable of a function, unknown to other methods."""
        names = self.file.names(within=value)
        own = [name for name in names if not self.is_context(name) and name.value != "self"]
        return any(self.file.is_local(name) for name in own)


def rename_holder(holder: str, names: dict[str, str]) -> str:
    """Return a holder under the new name of a renamed attribute."""
    return _ATTRIBUTE.sub(lambda found: names.get(found.group(), found.group()), holder)


def _find_holders(file: ModuleFile, call: cst.Call, assignments: _Assignments) -> list[str]:
    """Return the holders of the result of a wrapping call; empty if the code does not say."""
    statement = file.statement(call)
    if isinstance(statement, cst.Return):  # of a method: find the holders of its result
        function = file.function(call)
        name = "" if function is None else function.name.value
        calls = [(holder, value) for holder, value in assignments if isinstance(value, cst.Call)]
        return [f"self.{holder}" for holder, value in calls if attribute_of_self(value.func) == name]
    if isinstance(statement, cst.Expr):
        return _holders_in_expression(statement, call, assignments)
    if isinstance(statement, cst.Assign | cst.AnnAssign) and statement.value is not None:
        return _holders_in_assignment(statement, statement.value, call, assignments)
    return []


def _holders_in_expression(statement: cst.Expr, call: cst.Call, assignments: _Assignments) -> list[str]:
    outer = statement.value
    if outer is call:
        return _holders_of_name(call.args[0].value, assignments) if call.args else []
    if isinstance(outer, cst.Call) and isinstance(outer.func, cst.Attribute) and outer.func.attr.value == "append":
        name = attribute_of_self(outer.func.value)
        return [f"*self.{name}"] if name and outer.args[0].value is call else []
    return []


def _holders_of_name(value: cst.BaseExpression, assignments: _Assignments) -> list[str]:
    """Return the attributes a name stands for, or is assigned to."""
    known = dotted_name(value)
    if attribute_of_self(value):
        return [known]
    return [f"self.{holder}" for holder, given in assignments if known and dotted_name(given) == known][:1]


def _holders_in_assignment(
    statement: cst.Assign | cst.AnnAssign, value: cst.BaseExpression, call: cst.Call, assignments: _Assignments
) -> list[str]:
    target = list_targets(statement)[0]
    if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
        pairs = zip(target.elements, value.elements, strict=False)
        held_by = [left.value for left, right in pairs if right.value is call]
        return [dotted_name(holder) for holder in held_by if attribute_of_self(holder)]
    if isinstance(target, cst.Subscript):
        name = attribute_of_self(target.value)
        is_dict = any(holder == name and is_by_name(given) for holder, given in assignments)
        return [f"*self.{name}.values()"] if name and value is call and is_dict else []
    if _is_result(value, call):
        is_name = isinstance(target, cst.Name) or attribute_of_self(target)
        return _holders_of_name(target, assignments) if is_name else []
    held = value
    if isinstance(value, cst.Call) and last_name(value.func) in _CONTAINERS and value.args:
        held = value.args[0].value
    if not attribute_of_self(target) or not isinstance(held, (*_SEVERAL, *_BY_NAME)):
        return []
    return [f"*{dotted_name(target)}{'.values()' if isinstance(held, _BY_NAME) else ''}"]


def is_by_name(value: cst.BaseExpression) -> bool:
    """Return whether an expression makes a dict."""
    return isinstance(value, _BY_NAME) or (isinstance(value, cst.Call) and dotted_name(value.func) == "dict")


def _is_result(value: cst.BaseExpression, call: cst.Call) -> bool:
    """Return whether an expression may have the value of a call."""
    if isinstance(value, cst.IfExp):
        return _is_result(value.body, call) or _is_result(value.orelse, call)
    return value is call
