"""Names of members: those that Lightning wants, and those that it has for itself."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, targets_of
from det_lightning.porting.to_lightning.module_file import attribute_of_self
from det_lightning.porting.to_lightning.trial import Trial

# Of LightningModule; what a trial calls so gets another name.
_RESERVED = re.compile(
    "all_gather|automatic_optimization|backward|clip_gradients|configure_callbacks|configure_gradient_clipping"
    "|configure_model|configure_optimizers|current_epoch|device|device_mesh|dtype|example_input_array|fabric|freeze"
    "|global_rank|global_step|hparams_initial|local_rank|log|log_dict|logger|loggers|lr_scheduler_step|lr_schedulers"
    "|manual_backward|on_gpu|optimizer_step|optimizer_zero_grad|optimizers|prepare_data|print|setup|strict_loading"
    "|teardown|to|trainer|training|training_step|type|validation_step"
)


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
