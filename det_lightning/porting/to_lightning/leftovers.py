"""Marks the uses of the context that remain after all other rewriting."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.imports import Bindings, Reference
from det_lightning.porting.python_syntax import (
    PythonFile,
    dotted_name,
    list_methods,
    list_parameters,
    read_string,
    rename_in_code,
)
from det_lightning.porting.to_lightning.module_file import ModuleFile, attribute_of_self, list_statements
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


_LOADER = "determined.pytorch.DataLoader"
_TORCH_LOADER = "torch.utils.data.DataLoader"
_ANY = "from typing import Any"
#: Advice for names without a counterpart, by the last part.
ADVICE = {
    "InvalidHP": "instead of InvalidHP, raise an error that your search counts as a failed run",
    "TorchWriter": "self.logger.experiment of a TensorBoardLogger replaces TorchWriter().writer",
    "reset_parameters": "torch draws weights when modules are made; leave reset_parameters() out",
}


class Imports:
    """Resolves the imported names of a file, and rewrites the import statements."""

    def __init__(self, file: ModuleFile) -> None:
        self._file = file
        self._bindings = Bindings(file, "det_lightning")
        self.needed: set[str] = set()  # statements

    def rewrite_uses(self) -> None:
        """Use torch's ``DataLoader``, and ``Any`` in annotations."""
        for use in self._bindings.references:
            if use.path == _LOADER and use.attributes:
                self.needed.add("import torch")
                self._file.replace(use.expression, _TORCH_LOADER)
            elif use.path == _LOADER:
                alias = "" if use.node.value == "DataLoader" else f" as {use.node.value}"
                self.needed.add(f"from torch.utils.data import DataLoader{alias}")
            elif self._file.is_annotation(use.node):
                self.needed.add(_ANY)
                self._file.replace(use.expression, "Any")
        paths = {binding.name: binding.path for binding in reversed(self._bindings.found)}  # the first of each name

        def rename(name: str) -> str | None:
            first, dot, rest = name.partition(".")
            if first not in paths:
                return None
            return _TORCH_LOADER if f"{paths[first]}{dot}{rest}" == _LOADER else "Any"

        for quoted in self._file.find(cst.SimpleString):
            code = read_string(quoted)
            if code is not None and self._file.is_annotation(quoted):
                new = rename_in_code(code, rename)
                if new != code:
                    self.needed |= {"import torch", _ANY}
                    self._file.replace(quoted, f'"{new}"')

    def left_uses(self, within: cst.CSTNode) -> list[Reference]:
        """Return the uses within a node with names of det_lightning still to be replaced."""
        names = set(self._file.names(within=within))
        uses = [use for use in self._bindings.references if use.node in names and use.path != _LOADER]
        return [use for use in uses if not self._file.edits.covers(*self._file.span(use.expression))]

    def rewrite(self, remaining: set[str]) -> None:
        """Replace the imports of det_lightning, except for the ``remaining`` names."""
        if not re.search(r"\bAny\b", self._file.edits.result()):
            self.needed.discard(_ANY)
        new = sorted(self.needed - self._existing())
        ours = {binding.alias: binding.name for binding in self._bindings.found}
        found = dict.fromkeys([*(binding.statement for binding in self._bindings.found), *self._bindings.stars])
        # Those at module level first, where needed names are to be imported.
        for statement in sorted(found, key=lambda one: len(list(self._file.ancestors(one)))):
            left = [alias for alias in _aliases(statement) if ours.get(alias) in remaining]
            kept = [alias for alias in _aliases(statement) if alias in left or alias not in ours]
            self._file.replace_statement(statement, [*_import_lines(statement, kept), *new])
            new = []
            if left:
                self._file.todo(statement, "these names are still used and must be replaced")

    def _existing(self) -> set[str]:
        existing = set()
        for statement in self._file.find(cst.Import, cst.ImportFrom):
            if isinstance(self._file.parent(self._file.parent(statement)), cst.Module):
                existing.add(self._file.source(statement))
                if isinstance(statement, cst.ImportFrom) and dotted_name(statement.module) == "typing":
                    existing.update(f"from typing import {alias.evaluated_name}" for alias in _aliases(statement))
        return existing


def _aliases(statement: cst.Import | cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def _import_lines(statement: cst.Import | cst.ImportFrom, aliases: list[cst.ImportAlias]) -> list[str]:
    """Return an import statement with the given names only; no lines without names."""
    named = [(alias.evaluated_name, alias.evaluated_alias) for alias in aliases]
    names = ", ".join(f"{name} as {alias}" if alias else name for name, alias in named)
    module = "" if isinstance(statement, cst.Import) else f"from {dotted_name(statement.module)} "
    return [f"{module}import {names}"] if names else []


def remove_unused_imports(file: ModuleFile, before: str) -> None:
    """Remove the imports needed only by code no longer in the file; ``before`` is the old text."""
    gone = _find_used_names(PythonFile(before)) - _find_used_names(file)
    for statement in list_statements(file.module):
        if isinstance(statement, cst.Import | cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
            names = {one: one.evaluated_alias or one.evaluated_name.partition(".")[0] for one in statement.names}
            kept = [alias for alias, name in names.items() if name not in gone]
            if len(kept) < len(names):
                file.replace_statement(statement, _import_lines(statement, kept))


def _find_used_names(file: PythonFile) -> set[str]:
    """Return the names used by code, and the words in strings, because strings may be annotations."""
    imports = [name for node in file.find(cst.Import, cst.ImportFrom) for name in file.names(within=node)]
    used = {name.value for name in set(file.names()) - set(imports)}
    for text in file.find(cst.SimpleString):
        used.update(re.findall(r"\w+", text.value))
    return used
