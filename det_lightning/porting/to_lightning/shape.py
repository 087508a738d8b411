"""What a trial is made of: its context, and what it wraps."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from typing import cast

from det_lightning.porting.to_lightning.source import Source, attribute_of_self, dotted


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A wrapped learning rate scheduler.

    Attributes:
        name: the attribute that holds it.
        mode: its step mode; empty if the code does not say.
        frequency: the text of its frequency.
    """

    name: str
    mode: str
    frequency: str


class TrialShape:
    """Finds in a trial what the context is called and what was wrapped with it.

    Args:
        source: the file.
        definition: the class of the trial.

    Attributes:
        optimizers: attributes that hold wrapped optimizers; with ``*`` before those that hold several.
        schedulers: the wrapped schedulers.
        methods: the methods by name.
    """

    def __init__(self, source: Source, definition: ast.ClassDef) -> None:
        self.source = source
        self.definition = definition
        self.methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
        init = self.methods.get("__init__")
        self.context_parameter = init.args.args[1].arg if init is not None and len(init.args.args) > 1 else ""
        self._context_attributes = {
            name for name, value in self._assignments() if dotted(value) == self.context_parameter != ""
        }
        self.optimizers: list[str] = []
        self.schedulers: list[Scheduler] = []
        for call in self.context_calls("wrap_optimizer"):
            self._add_optimizer(call)
        for call in self.context_calls("wrap_lr_scheduler"):
            self._add_scheduler(call)

    def _assignments(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield the attributes of ``self`` that are assigned, and what to."""
        for node in ast.walk(self.definition):
            if isinstance(node, ast.Assign):
                yield from ((name, node.value) for target in node.targets if (name := attribute_of_self(target)))
            elif isinstance(node, ast.AnnAssign) and node.value is not None and attribute_of_self(node.target):
                yield attribute_of_self(node.target), node.value

    def assigned(self) -> set[str]:
        """Return the attributes of ``self`` that the trial assigns."""
        return {name for name, _ in self._assignments()}

    def is_context(self, node: ast.AST) -> bool:
        """Return whether an expression is the trial's context."""
        if isinstance(node, ast.Name):
            function = self.source.function(node)
            return node.id == self.context_parameter and function is self.methods.get("__init__")
        return attribute_of_self(node) in self._context_attributes and isinstance(node, ast.Attribute)

    def context_calls(self, method: str) -> Iterator[ast.Call]:
        """Yield the calls of a method of the context."""
        for node in ast.walk(self.definition):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == method and self.is_context(called.value):
                yield cast(ast.Call, node)

    def _holders(self, call: ast.Call) -> list[str]:
        """Return the attributes that a wrapped object is kept in, with ``*`` before one that holds several."""
        statement = self.source.statement(call)
        if isinstance(statement, ast.Return):
            return self._holders_of_result(self.source.function(call))
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            return []
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if statement.value is call and isinstance(target, ast.Name):
            return [name for name, value in self._assignments() if dotted(value) == target.id][:1]
        name = attribute_of_self(target)
        return [name if statement.value is call else f"*{name}"] if name else []

    def _holders_of_result(self, function: ast.FunctionDef | None) -> list[str]:
        """Return the attributes that keep what a method of the trial returns."""
        return [
            name
            for name, value in self._assignments()
            if function is not None and isinstance(value, ast.Call) and attribute_of_self(value.func) == function.name
        ]

    def _add_optimizer(self, call: ast.Call) -> None:
        holders = self._holders(call)
        if not holders:
            advice = "configure_optimizers() has to return this optimizer too; keep it in an attribute"
            self.source.note(call, advice)
        self.optimizers += [holder for holder in holders if holder not in self.optimizers]

    def _add_scheduler(self, call: ast.Call) -> None:
        holders = self._holders(call)
        mode = dotted(argument(call, 1, "step_mode")).rpartition(".")[2]
        frequency = argument(call, 2, "frequency")
        text = "1" if frequency is None else ast.get_source_segment(self.source.text, frequency) or "1"
        if not holders or any(holder.startswith("*") for holder in holders):
            advice = "step this scheduler in on_train_batch_end(), and return it from configure_optimizers()"
            self.source.note(call, advice)
        else:
            self.schedulers += [Scheduler(holder, mode, text) for holder in holders]


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return an argument of a call, given by position or by name."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if len(call.args) > position else None
