"""Names of members: those that Lightning wants, and those that it has for itself."""

from __future__ import annotations

import ast
import dataclasses

from det_lightning.porting.to_lightning.shape import TrialShape
from det_lightning.porting.to_lightning.source import Source, attribute_of_self, dotted

# Of LightningModule; what a trial calls so gets another name.
_RESERVED = frozenset(
    (
        "all_gather",
        "automatic_optimization",
        "backward",
        "clip_gradients",
        "configure_callbacks",
        "configure_gradient_clipping",
        "configure_model",
        "configure_optimizers",
        "current_epoch",
        "device",
        "device_mesh",
        "dtype",
        "example_input_array",
        "fabric",
        "freeze",
        "global_rank",
        "global_step",
        "hparams_initial",
        "local_rank",
        "log",
        "log_dict",
        "logger",
        "loggers",
        "lr_scheduler_step",
        "lr_schedulers",
        "manual_backward",
        "on_gpu",
        "optimizer_step",
        "optimizer_zero_grad",
        "optimizers",
        "prepare_data",
        "print",
        "setup",
        "strict_loading",
        "teardown",
        "to",
        "trainer",
        "training",
        "training_step",
        "type",
        "validation_step",
    )
)


def rename_members(source: Source, shape: TrialShape, names: dict[str, str]) -> None:
    """Rename the trial, its loaders, and members whose names Lightning needs.

    Args:
        source: the file.
        shape: the trial.
        names: new names by old ones: of the trial's class, and of methods.
    """
    own = (shape.assigned() | set(shape.methods)) & _RESERVED
    members = {name: f"trial_{name}" for name in own} | names
    shape.schedulers[:] = [
        dataclasses.replace(scheduler, name=_renamed(scheduler.name, members)) for scheduler in shape.schedulers
    ]
    shape.optimizers[:] = [_renamed(name, members) for name in shape.optimizers]
    for node in ast.walk(source.tree):
        in_class = _is_within(source, node, shape.definition)
        if isinstance(node, ast.Attribute) and attribute_of_self(node) in members and in_class:
            start = source.span(node)[1] - len(node.attr)
            source.edits.replace(start, start + len(node.attr), members[node.attr])
        elif isinstance(node, ast.Name) and node.id in names and (in_class or node.id == shape.definition.name):
            source.rewrite(node, names[node.id])
    definitions: list[ast.ClassDef | ast.FunctionDef] = [shape.definition, *shape.methods.values()]
    for definition in definitions:
        if definition.name in members:
            _rename_definition(source, definition, members[definition.name])


def _renamed(name: str, members: dict[str, str]) -> str:
    star = "*" if name.startswith("*") else ""
    return star + members.get(name.removeprefix("*"), name.removeprefix("*"))


def _is_within(source: Source, node: ast.AST, definition: ast.ClassDef) -> bool:
    current: ast.AST | None = node
    while current is not None and current is not definition:
        current = source.parent(current)
    return current is definition


def _rename_definition(source: Source, node: ast.FunctionDef | ast.ClassDef, name: str) -> None:
    keyword = "def" if isinstance(node, ast.FunctionDef) else "class"
    start = source.text.index(node.name, source.text.index(keyword, source.span(node)[0]) + len(keyword))
    source.edits.replace(start, start + len(node.name), name)


def drop_own_hparams(source: Source, shape: TrialShape) -> None:
    """Remove ``self.hparams = ...`` where that is what Lightning's ``hparams`` is; otherwise call it differently."""
    statements = [
        node
        for node in ast.walk(shape.definition)
        if isinstance(node, ast.Assign) and any(attribute_of_self(target) == "hparams" for target in node.targets)
    ]
    if all(_is_same(source, shape, node.value) for node in statements):
        for node in statements:
            source.rewrite_lines(node, [])
        return
    for attribute in ast.walk(shape.definition):
        if isinstance(attribute, ast.Attribute) and attribute_of_self(attribute) == "hparams":
            source.rewrite(attribute, "self.trial_hparams")


def _is_same(source: Source, shape: TrialShape, value: ast.expr) -> bool:
    """Return whether a value holds the hyperparameters as they are; Lightning's have attributes too."""
    if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords and "ict" in dotted(value.func):
        return _is_same(source, shape, value.args[0])
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr == "get_hparams" and shape.is_context(value.func.value)
    return dotted(value) == "hparams"
