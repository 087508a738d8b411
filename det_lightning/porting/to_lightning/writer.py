"""A trial as a LightningModule: the file is kept, and what the trial is to Determined is rewritten."""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting.python_files import port_python
from det_lightning.porting.python_syntax import dotted_name, last_name, methods_of, targets_of
from det_lightning.porting.to_lightning.callbacks import rewrite_build_callbacks, rewrite_callback
from det_lightning.porting.to_lightning.context_calls import TRAINED_BATCHES, rewrite_context
from det_lightning.porting.to_lightning.imports import Imports, advice_for
from det_lightning.porting.to_lightning.module_file import ModuleFile, statements_of
from det_lightning.porting.to_lightning.reducers import rewrite_reducers
from det_lightning.porting.to_lightning.steps import (
    rewrite_evaluate_batch,
    rewrite_optimizer_steps,
    rewrite_train_batch,
)
from det_lightning.porting.to_lightning.trial import Scheduler, Trial, drop_own_hparams, parameters_of, rename_members

_REQUIRED = ("__init__", "train_batch", "build_training_data_loader", "build_validation_data_loader")
_LOADERS = {"build_training_data_loader": "train_dataloader", "build_validation_data_loader": "val_dataloader"}

# The data are gone over once more, since Lightning has no other hook for it.
_FULL_DATASET = [
    ["def validation_step(self, batch, batch_idx):", "    pass  # see on_validation_epoch_end()"],
    [
        "def on_validation_epoch_end(self):",
        "    metrics = self.evaluate_full_dataset(self.trainer.val_dataloaders)",
        "    self.log_dict(metrics, rank_zero_only=True)",
    ],
]


class NoTrialError(ValueError):
    """The file holds no trial that can be written as a LightningModule; the message says why."""


def write_module(text: str) -> tuple[str, int]:
    """Return the source of a trial as that of a LightningModule, and the number of TODO comments in it.

    Everything else in the file stays; what trains with Determined's ``Trainer`` becomes a comment. Raises NoTrialError,
    and libcst.ParserSyntaxError if it is not Python 3.
    """
    file = ModuleFile(port_python(text.replace("\r\n", "\n"))[0])
    definition = _find_trial(file)
    imports = Imports(file)
    trial = Trial(file, definition)
    module_name = re.sub(r"Trial$", "", definition.name.value) + "Module"
    rename_members(trial, {**_LOADERS, definition.name.value: module_name})
    file.replace(definition.name, module_name)
    imports.rewrite_uses()
    rewrite_context(trial)
    drop_own_hparams(trial)
    for base in definition.bases:
        if last_name(base.value) == "PyTorchTrial":
            file.replace(base.value, "pl.LightningModule")
    _rewrite_init(trial)
    reducing = rewrite_reducers(trial)
    _rewrite_methods(trial)
    _append_hooks(trial, reducing)
    for callback in _classes_of(file, "PyTorchCallback"):
        rewrite_callback(file, callback)
    imports.need("import pytorch_lightning as pl")
    imports.rewrite(_comment_out_what_trains(file, imports))
    written = file.edits.result()
    try:
        cst.parse_module(written)
    except cst.ParserSyntaxError as e:
        line = [*written.splitlines(), ""][e.raw_line - 1].strip()
        raise NoTrialError(f"it has a form that cannot be rewritten, near: {line}") from e
    return written, file.todos


def _classes_of(file: ModuleFile, base: str) -> list[cst.ClassDef]:
    return [node for node in file.find(cst.ClassDef) if any(last_name(given.value) == base for given in node.bases)]


def _find_trial(file: ModuleFile) -> cst.ClassDef:
    trials = _classes_of(file, "PyTorchTrial")
    if len(trials) != 1:
        names = ", ".join(trial.name.value for trial in trials) or "none"
        raise NoTrialError(f"exactly one class must derive from PyTorchTrial; found: {names}")
    (trial,) = trials
    name = trial.name.value
    defined = {method.name.value for method in methods_of(trial)}
    for statement in statements_of(trial.body):
        if isinstance(statement, cst.Assign):
            defined.update(dotted_name(target) for target in targets_of(statement))
    missing = [method for method in _REQUIRED if method not in defined]
    if {"evaluate_batch", "evaluate_full_dataset"}.isdisjoint(defined):
        missing.append("evaluate_batch")
    if "build_model" in defined and "optimizer" in defined:
        raise NoTrialError(
            f"{name} has the interface before Determined 0.12.13 (build_model, optimizer); wrap model and "
            "optimizer in __init__ and call context.backward() and context.step_optimizer() in train_batch first"
        )
    if missing:
        raise NoTrialError(f"{name} does not define {', '.join(missing)}")
    return trial


def _rewrite_init(trial: Trial) -> None:
    file = trial.file
    init = trial.methods["__init__"]
    for call in file.find(cst.Call, within=init):
        is_base = isinstance(call.func, cst.Attribute) and call.func.attr.value == "__init__"
        if is_base and isinstance(file.parent(call), cst.Expr):
            file.replace_statement(file.statement(call), [])
    own = any(parameter.name.value == "hparams" for parameter in parameters_of(init)[2:])
    written = _parameters(file, init)
    if not own and init.params.star_kwarg is None:
        written.append("**hparams")
    returns = " -> None" if init.returns is not None else ""
    file.replace_signature(init, f"def __init__({', '.join(written)}){returns}")
    saved = "hparams" if own else ""
    lines = ["super().__init__()", f"self.save_hyperparameters({saved})", "self.automatic_optimization = False"]
    file.insert_in_body(init, lines)


def _parameters(file: ModuleFile, function: cst.FunctionDef) -> list[str]:
    """Return the text of all parameters but the context."""

    def text(parameter: cst.Param) -> str:
        start, end = file.span(parameter.name)
        if parameter.annotation is not None:
            end = file.span(parameter.annotation.annotation)[1]
        if parameter.default is not None:
            end = file.span(parameter.default)[1]
        return file.edits.render(start, end)

    given = function.params
    texts = ["self", *(text(parameter) for parameter in parameters_of(function)[2:])]
    if isinstance(given.star_arg, cst.Param):
        texts.append(f"*{text(given.star_arg)}")
    elif given.kwonly_params:
        texts.append("*")
    texts += [text(parameter) for parameter in given.kwonly_params]
    return [*texts, *([] if given.star_kwarg is None else [f"**{text(given.star_kwarg)}"])]


def _rewrite_methods(trial: Trial) -> None:
    methods = trial.methods
    rewrite_optimizer_steps(trial)
    rewrite_train_batch(trial.file, methods["train_batch"])
    if "evaluate_batch" in methods:
        rewrite_evaluate_batch(trial.file, methods["evaluate_batch"], methods.get("evaluation_reducer"))
    if "build_callbacks" in methods:
        rewrite_build_callbacks(trial.file, methods["build_callbacks"])
    if "get_batch_length" in methods:
        trial.file.replace_statement(methods["get_batch_length"], [])


def _append_hooks(trial: Trial, reducing: list[list[str]]) -> None:
    file = trial.file
    returned = f"[{', '.join(_held(name) for name in trial.optimizers)}]"
    if trial.schedulers:
        returned += f", [{', '.join(_held(scheduler.name) for scheduler in trial.schedulers)}]"
    methods = [["def configure_optimizers(self):", f"    return {returned}"]]
    steps = [line for scheduler in trial.schedulers for line in _scheduler_lines(file, scheduler)]
    if steps:
        counted = [f"    batch_idx = {TRAINED_BATCHES}  # over all epochs"] if "batch_idx" in " ".join(steps) else []
        head = "def on_train_batch_end(self, outputs, batch, batch_idx):"
        methods.insert(0, [head, *counted, *(f"    {line}" for line in steps)])
    full = trial.methods.get("evaluate_full_dataset")
    file.append_to_class(trial.definition, [*reducing, *methods, *([] if full is None else _FULL_DATASET)])
    if full is not None and "self.device" not in file.render(full):
        file.todo(full, "move the batches of the loader to self.device here")
    if full is not None and reducing:
        file.todo(full, "put the hooks on_validation_epoch_end() below into one")


def _held(name: str) -> str:
    return f"*self.{name[1:]}" if name.startswith("*") else f"self.{name}"


def _scheduler_lines(file: ModuleFile, scheduler: Scheduler) -> list[str]:
    step = f"self.{scheduler.name}.step()"
    every = scheduler.frequency
    if scheduler.mode == "MANUAL_STEP":
        return []
    if scheduler.mode == "STEP_EVERY_EPOCH":
        condition = "self.trainer.is_last_batch"
        condition += "" if every == "1" else f" and (self.current_epoch + 1) % {every} == 0"
        return [f"if {condition}:", f"    {step}"]
    if scheduler.mode in ("STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP"):
        return [step] if every == "1" else [f"if (batch_idx + 1) % {every} == 0:", f"    {step}"]
    file.todos += 1
    return [f"# TODO: call {step} when its step mode says", "pass"]


def _comment_out_what_trains(file: ModuleFile, imports: Imports) -> set[str]:
    """Turn statements that need Determined's trainer into comments; return the names that are used nevertheless."""
    remaining: set[str] = set()
    gone: set[str] = set()
    for statement in statements_of(file.module):
        if isinstance(statement, cst.Import | cst.ImportFrom):
            continue
        left = imports.left_uses(statement)
        if isinstance(statement, cst.ClassDef):
            remaining.update(use.node.value for use in left)
            for use in left:
                file.todo(use.node, advice_for(use.path) or f"nothing replaces {dotted_name(use.expression)}")
        elif left or any(name.value in gone for name in file.names(within=statement)):
            if isinstance(statement, cst.FunctionDef):
                gone.add(statement.name.value)
            elif isinstance(statement, cst.Assign):
                gone.update(dotted_name(target) for target in targets_of(statement))
            file.todo(statement, "pl.Trainer(max_epochs=...).fit(module) replaces this")
            lines = file.render(statement).splitlines()
            file.replace(statement, "\n".join(f"# {line}".rstrip() for line in lines))
    return remaining
