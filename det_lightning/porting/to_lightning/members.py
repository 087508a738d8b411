"""Renames members of a trial whose names Lightning reserves."""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, list_targets
from det_lightning.porting.to_lightning.context_calls import find_settings
from det_lightning.porting.to_lightning.module_file import attribute_of_self
from det_lightning.porting.to_lightning.trial import Trial, rename_holder

# Names of LightningModule; a trial's members with these names are renamed.
_RESERVED = re.compile(
    "_buffers|_device|_fabric|_modules|_parameters|all_gather|automatic_optimization|backward|children|clip_gradients"
    "|configure_callbacks|configure_gradient_clipping|configure_model|configure_optimizers|current_epoch|device"
    "|device_mesh|dtype|eval|example_input_array|fabric|freeze|global_rank|global_step|hparams_initial|local_rank|log"
    "|log_dict|logger|loggers|lr_scheduler_step|lr_schedulers|manual_backward|modules|named_parameters|on_\\w+"
    "|optimizer_step|optimizer_zero_grad|optimizers|parameters|predict_step|prepare_data|print|setup|state_dict"
    "|strict_loading|teardown|test_step|to|train|trainer|training|training_step|transfer_batch_to_device|type"
    "|validation_step|zero_grad|(?:predict|test|train|val)_dataloader"
)


def rename_members(trial: Trial, names: dict[str, str]) -> None:
    """Rename the class and methods of the trial by ``names``, and all members with names reserved by Lightning."""
    file = trial.file
    own = {name for name, _ in trial.assignments()} | set(trial.methods)
    if _is_that_of_context(trial, "device"):
        own.discard("device")
    members = {name: f"trial_{name}" for name in own if _RESERVED.fullmatch(name)} | names
    for scheduler in trial.schedulers:
        scheduler.holder = rename_holder(scheduler.holder, members)
    trial.optimizers = [rename_holder(name, members) for name in trial.optimizers]
    trial.models = [rename_holder(name, members) for name in trial.models]
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


def _is_that_of_context(trial: Trial, attribute: str) -> bool:
    """Return whether ``self.device`` is ``context.device``, which Lightning's attribute can replace."""
    values = [value for name, value in trial.assignments() if name == attribute]
    return bool(values) and all(
        isinstance(value, cst.Attribute) and value.attr.value == attribute and trial.is_context(value.value)
        for value in values
    )


def drop_own_hparams(trial: Trial) -> None:
    """Remove ``self.hparams = ...`` if equal to Lightning's ``hparams``; otherwise rename the attribute."""
    statements = [
        node
        for node in trial.file.find(cst.Assign, cst.AnnAssign, within=trial.definition)
        if any(attribute_of_self(target) == "hparams" for target in list_targets(node))
    ]
    if not find_settings(trial) and all(node.value is not None and _is_same(trial, node.value) for node in statements):
        for node in statements:
            trial.file.replace_statement(node, [])
    elif statements:
        for attribute in trial.find_uses("hparams"):
            trial.file.replace(attribute, "self.trial_hparams")


def _is_same(trial: Trial, value: cst.BaseExpression) -> bool:
    """Return whether a value is a plain dict of the unchanged hyperparameters."""
    if not isinstance(value, cst.Call):
        return dotted_name(value) == "hparams"
    if isinstance(value.func, cst.Attribute):
        return value.func.attr.value == "get_hparams" and trial.is_context(value.func.value)
    is_copied = dotted_name(value.func) == "dict" and len(value.args) == 1
    return is_copied and not (value.args[0].star or value.args[0].keyword) and _is_same(trial, value.args[0].value)
