"""Marks the uses of the context that remain after all other rewriting."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.python_syntax import PythonFile, dotted_name, list_methods, list_parameters
from det_lightning.porting.to_lightning.module_file import ModuleFile, attribute_of_self
from det_lightning.porting.to_lightning.trial import Trial

_ADVICE = "a LightningModule has no context; pass the needed values"
# Methods of a context with unmistakable names.
_OF_CONTEXT = {
    "autocast_forward_pass", "configure_apex_amp", "current_train_batch", "current_train_epoch",
    "disable_auto_to_device", "disable_dataset_reproducibility_checks", "get_data_config", "get_experiment_config",
    "get_experiment_id", "get_global_batch_size", "get_hparam", "get_hparams", "get_initial_batch",
    "get_per_slot_batch_size", "get_stop_requested", "get_tensorboard_path", "get_tensorboard_writer", "get_trial_id",
    "get_trial_seed", "is_epoch_end", "is_epoch_start", "reset_reducers", "set_profiler", "set_stop_requested",
    "step_optimizer", "use_amp", "wrap_lr_scheduler", "wrap_model", "wrap_optimizer", "wrap_reducer", "wrap_scaler",
}  # fmt: skip

_ALSO_OF_OTHERS = {"distributed", "experimental", "lr_schedulers", "models", "optimizers", "scaler", "to_device"}


def mark_leftovers(file: ModuleFile, trial: Trial, module_name: str) -> None:
    """Put a comment at each remaining use of a context, unless it has one."""
    annotated = {
        re.sub(f"^{trial.definition.name.value}\\b", module_name, key)
        for key, parameter in _parameters(trial.file)
        if parameter.annotation is not None and "TrialContext" in trial.file.source(parameter.annotation.annotation)
    }
    found = {parameter for key, parameter in _parameters(file) if key in annotated}
    found |= _find_contexts(file, trial.context_parameter)
    for definition in file.find(cst.ClassDef):
        is_module = definition.name.value == module_name
        kept = trial.context_attributes if is_module else _find_attributes(file, definition, found)
        for attribute in file.find(cst.Attribute, within=definition):
            if attribute_of_self(attribute) in kept:
                _mark(file, attribute)
    for name in file.names():
        if any(given in found for given in file.assignments(name)):
            _mark(file, name)
    for parameter in found:
        _mark(file, parameter)
    for attribute in file.find(cst.Attribute):
        if attribute.attr.value in _OF_CONTEXT and dotted_name(attribute.value) != "self":
            _mark(file, attribute)


def _parameters(file: PythonFile) -> Iterator[tuple[str, cst.Param]]:
    """Yield the parameters of all functions, each with a key of class, function and parameter name."""
    for function in file.find(cst.FunctionDef):
        outer = next((node for node in file.ancestors(function) if isinstance(node, cst.ClassDef)), None)
        name = f"{'' if outer is None else outer.name.value}.{function.name.value}"
        for parameter in [*list_parameters(function), *function.params.kwonly_params]:
            yield f"{name}.{parameter.name.value}", parameter


def _mark(file: ModuleFile, node: cst.CSTNode) -> None:
    line = file.edits.offset(file.first_line(file.statement(node)), 0)
    above = file.text[:line].rstrip("\n").rpartition("\n")[2]
    if not above.lstrip().startswith("# TODO: "):
        file.todo(node, _ADVICE)


def _find_contexts(file: ModuleFile, name: str) -> set[cst.Param]:
    """Return the parameters used like a context; for parameters called ``name``, common method names count too."""
    found: set[cst.Param] = set()
    for attribute in file.find(cst.Attribute):
        owner = attribute.value
        methods = _OF_CONTEXT | _ALSO_OF_OTHERS if dotted_name(owner) == name else _OF_CONTEXT
        if attribute.attr.value in methods and isinstance(owner, cst.Name):
            found.update(given for given in file.assignments(owner) if isinstance(given, cst.Param))
    return {parameter for parameter in found if parameter.name.value != "self"}


def _find_attributes(file: ModuleFile, definition: cst.ClassDef, parameters: set[cst.Param]) -> set[str]:
    attributes = file.find(cst.Attribute, within=definition)
    kept = {attribute_of_self(one.value) for one in attributes if one.attr.value in _OF_CONTEXT}
    for method in list_methods(definition):
        for statement in file.find(cst.Assign, within=method):
            value = statement.value
            if isinstance(value, cst.Name) and not parameters.isdisjoint(file.assignments(value)):
                kept.update(attribute_of_self(target.target) for target in statement.targets)
    return kept - {""}
