"""What a trial is made of: its context, its methods, and what it wraps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, last_name, methods_of, targets_of
from det_lightning.porting.to_lightning.holders import holders_of, is_in_module, parameters_of
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self

# What scales gradients.
_AMP = ("use_amp", "wrap_scaler", "configure_apex_amp")


class ContextNames:
    """The parameter of ``__init__``, and the variables and attributes of ``self`` that it is assigned to."""

    def __init__(self, file: ModuleFile, definition: cst.ClassDef, parameter: cst.Param | None) -> None:
        self._file = file
        self.attributes: set[str] = set()
        self._variables: set[cst.CSTNode] = set()  # where they get their value
        if parameter is not None:
            self._variables.add(parameter)
        statements = file.find(cst.Assign, cst.AnnAssign, within=definition)
        while self._find_more(statements):
            pass

    def _find_more(self, statements: list[cst.Assign | cst.AnnAssign]) -> bool:
        """Add what a known name is assigned to; return whether there is more than before."""
        known = len(self._variables) + len(self.attributes)
        for statement in statements:
            is_context = statement.value is not None and self.include(statement.value)
            for target in targets_of(statement) if is_context else []:
                if isinstance(target, cst.Name):
                    self._variables.add(target)
                elif name := attribute_of_self(target):
                    self.attributes.add(name)
        return len(self._variables) + len(self.attributes) > known

    def include(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the context, and cannot be anything else."""
        if isinstance(node, cst.Name):
            assigned = self._file.assignments(node)
            return bool(assigned) and all(given in self._variables for given in assigned)
        return attribute_of_self(node) in self.attributes


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A wrapped learning rate scheduler."""

    holder: str  # see holders_of()
    mode: str  # empty if the code does not say
    frequency: cst.BaseExpression | None
    every: str = "1"  # the frequency, as it is written


class Trial:
    """Finds in a trial what the context is called and what was wrapped with it."""

    def __init__(self, file: ModuleFile, definition: cst.ClassDef) -> None:
        self.file = file
        self.definition = definition
        self.methods = {method.name.value: method for method in methods_of(definition)}
        init = self.methods.get("__init__")
        parameters = [] if init is None else parameters_of(init)
        self.context_parameter = parameters[1].name.value if len(parameters) > 1 else ""
        self.contexts = ContextNames(file, definition, parameters[1] if len(parameters) > 1 else None)
        self._called_by_init = self.reached_from("__init__")
        self.properties: dict[str, str] = {}  # expressions, by the names that replace attributes
        self.finds_optimizers = False  # a step looks up Lightning's optimizer for that of the trial
        # What holds them; see holders_of().
        self.models: list[str] = []
        self.optimizers: list[str] = []
        self.schedulers: list[Scheduler] = []
        for call in self.context_calls("wrap_model"):
            self._add_model(call)
        for call in self.context_calls("wrap_optimizer"):
            self._add_optimizer(call)
        for call in self.context_calls("wrap_lr_scheduler"):
            self._add_scheduler(call)

    def assignments(self) -> Iterator[tuple[str, cst.BaseExpression]]:
        """Yield the attributes of ``self`` that are assigned to, and their values."""
        for statement in self.file.find(cst.Assign, cst.AnnAssign, within=self.definition):
            for target in targets_of(statement):
                if (name := attribute_of_self(target)) and statement.value is not None:
                    yield name, statement.value

    def assigned(self) -> set[str]:
        return {name for name, _ in self.assignments()}

    def uses_of(self, attribute: str) -> list[cst.Attribute]:
        """Return where an attribute of ``self`` is named, including assignments."""
        found = self.file.find(cst.Attribute, within=self.definition)
        return [node for node in found if attribute_of_self(node) == attribute]

    def is_context(self, node: cst.CSTNode) -> bool:
        return self.contexts.include(node)

    def context_calls(self, *methods: str) -> Iterator[cst.Call]:
        for call in self.file.find(cst.Call, within=self.definition):
            called = call.func
            if isinstance(called, cst.Attribute) and called.attr.value in methods:
                base = called.value
                is_part = isinstance(base, cst.Attribute) and base.attr.value in ("experimental", "distributed")
                if self.is_context(base.value if is_part and isinstance(base, cst.Attribute) else base):
                    yield call

    def uses_amp(self) -> bool:
        return next(self.context_calls(*_AMP), None) is not None

    def runs_before_training(self, node: cst.CSTNode) -> bool:
        """Return whether code is run by ``__init__``, when there is no trainer yet."""
        return any(outer in self._called_by_init for outer in self.file.ancestors(node))

    def reached_from(self, name: str) -> set[cst.FunctionDef]:
        """Return a method and the methods that it names, directly or not."""
        found: set[cst.FunctionDef] = set()
        waiting = [name]
        while waiting:
            method = self.methods.get(waiting.pop())
            if method is not None and method not in found:
                found.add(method)
                waiting += [attribute_of_self(node) for node in self.file.find(cst.Attribute, within=method)]
        return found

    def _holders(self, call: cst.Call, advice: str) -> list[str]:
        """Return what holds the result of a call; where the code does not say, put the advice above it."""
        holders = holders_of(self.file, call, list(self.assignments()))
        if not holders:
            self.file.todo(call, advice)
        return holders

    def _add_model(self, call: cst.Call) -> None:
        holders = self._holders(
            call, "keep this model in an attribute: Lightning saves, moves and counts no other ones"
        )
        if any(holder.startswith("*") for holder in holders) and not is_in_module(call, self.file):
            self.file.todo(call, "keep these models in a torch.nn.ModuleList: Lightning saves and moves no other lists")
        self.models += [holder for holder in holders if holder not in self.models]

    def _add_optimizer(self, call: cst.Call) -> None:
        advice = "configure_optimizers() must return this optimizer too; keep it in an attribute"
        holders = self._holders(call, advice)
        for holder in holders:
            if any(name == holder and dotted_name(value) == "None" for name, value in self.assignments()):
                self.file.todo(call, f"configure_optimizers() must leave self.{holder} out where it is None")
        self.optimizers += [holder for holder in holders if holder not in self.optimizers]

    def _add_scheduler(self, call: cst.Call) -> None:
        advice = "step this scheduler in on_train_batch_end(), and return it from configure_optimizers()"
        holders = self._holders(call, advice)
        frequency = argument(call, 2, "frequency")
        if holders and frequency is not None and self._is_local(frequency):
            self.file.todo(call, "on_train_batch_end() needs the frequency: keep it in an attribute")
        known = [scheduler.holder for scheduler in self.schedulers]
        mode = last_name(argument(call, 1, "step_mode"))
        self.schedulers += [Scheduler(holder, mode, frequency) for holder in holders if holder not in known]

    def render_frequencies(self) -> None:
        """Keep the rewritten frequencies of schedulers, before the calls that wrap the schedulers are removed."""
        self.schedulers[:] = [
            scheduler
            if scheduler.frequency is None
            else dataclasses.replace(scheduler, every=self.file.render(scheduler.frequency))
            for scheduler in self.schedulers
        ]

    def _is_local(self, value: cst.BaseExpression) -> bool:
        """Return whether an expression names a variable of a function, which other methods do not have."""
        names = self.file.names(within=value)
        own = [name for name in names if not self.is_context(name) and name.value != "self"]
        return any(self.file.is_local(name) for name in own)
