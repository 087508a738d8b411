"""A trial as a LightningModule: the file is kept, and what the trial is to Determined is rewritten."""

from __future__ import annotations

import ast
import re

from det_lightning.porting.python_files import port_python
from det_lightning.porting.to_lightning.callbacks import rewrite_build_callbacks, rewrite_callback
from det_lightning.porting.to_lightning.context_calls import TRAINED_BATCHES, rewrite_context
from det_lightning.porting.to_lightning.imports import Imports, advice_for
from det_lightning.porting.to_lightning.members import drop_own_hparams, rename_members
from det_lightning.porting.to_lightning.reducers import rewrite_reducers
from det_lightning.porting.to_lightning.shape import Scheduler, TrialShape
from det_lightning.porting.to_lightning.source import Source, dotted
from det_lightning.porting.to_lightning.steps import (
    rewrite_evaluate_batch,
    rewrite_optimizer_steps,
    rewrite_train_batch,
)

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
    """Write a file with a trial as one with a LightningModule.

    Everything else in the file stays: models, datasets, functions. What trains with Determined's ``Trainer`` becomes a
    comment.

    Args:
        text: Python source with one trial, of determined or det_lightning.

    Returns:
        The new source, and the number of TODO comments in it.

    Raises:
        NoTrialError: there is no trial, or more than one, or it lacks a method.
        libcst.ParserSyntaxError: it is not Python 3.
    """
    source = Source(port_python(text.replace("\r\n", "\n"))[0])
    definition = _find_trial(source)
    imports = Imports(source)
    shape = TrialShape(source, definition)
    name = re.sub(r"Trial$", "", definition.name) + "Module"
    rename_members(source, shape, {**_LOADERS, definition.name: name})
    imports.rewrite_loaders()
    rewrite_context(source, shape)
    drop_own_hparams(source, shape)
    _rewrite_base(source, definition)
    _rewrite_init(source, shape)
    reducing = rewrite_reducers(source, shape)
    _rewrite_methods(source, shape)
    _append_hooks(source, shape, reducing)
    for callback in _classes_of(source, "PyTorchCallback"):
        rewrite_callback(source, callback)
    imports.need("import pytorch_lightning as pl")
    remaining = _comment_out_what_trains(source, imports)
    imports.rewrite(remaining)
    written = source.edits.result()
    _require_readable(written)
    return written, source.todos


def _require_readable(written: str) -> None:
    try:
        ast.parse(written)
    except SyntaxError as e:
        raise NoTrialError(f"it has a form that cannot be rewritten, near: {(e.text or '').strip()}") from e


def _classes_of(source: Source, base: str) -> list[ast.ClassDef]:
    classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    return [node for node in classes if any(dotted(given).rpartition(".")[2] == base for given in node.bases)]


def _find_trial(source: Source) -> ast.ClassDef:
    trials = _classes_of(source, "PyTorchTrial")
    if len(trials) != 1:
        names = ", ".join(trial.name for trial in trials) or "none"
        raise NoTrialError(f"one class has to derive from PyTorchTrial; found: {names}")
    defined = {node.name for node in trials[0].body if isinstance(node, ast.FunctionDef)}
    for node in trials[0].body:
        if isinstance(node, ast.Assign):
            defined.update(dotted(target) for target in node.targets)
    missing = [name for name in _REQUIRED if name not in defined]
    if {"evaluate_batch", "evaluate_full_dataset"}.isdisjoint(defined):
        missing.append("evaluate_batch")
    if "build_model" in defined and "optimizer" in defined:
        raise NoTrialError(
            f"{trials[0].name} has the interface before Determined 0.12.13 (build_model, optimizer); wrap model and "
            "optimizer in __init__ and call context.backward() and context.step_optimizer() in train_batch first"
        )
    if missing:
        raise NoTrialError(f"{trials[0].name} does not define {', '.join(missing)}")
    return trials[0]


def _rewrite_base(source: Source, definition: ast.ClassDef) -> None:
    for base in definition.bases:
        if dotted(base).rpartition(".")[2] == "PyTorchTrial":
            source.rewrite(base, "pl.LightningModule")


def _rewrite_init(source: Source, shape: TrialShape) -> None:
    init = shape.methods["__init__"]
    for node in ast.walk(init):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
            source.rewrite_lines(source.statement(call), [])
    own = any(given.arg == "hparams" for given in init.args.args[2:])
    written = [*_parameters(source, init.args), *([] if own or init.args.kwarg else ["**hparams"])]
    start, end = source.signature(init)
    returns = " -> None" if init.returns is not None else ""
    source.edits.rewrite(start, end, f"def __init__({', '.join(written)}){returns}")
    saved = "hparams" if own else ""
    lines = ["super().__init__()", f"self.save_hyperparameters({saved})", "self.automatic_optimization = False"]
    source.insert_in_body(init, lines)


def _parameters(source: Source, given: ast.arguments) -> list[str]:
    """Return the text of all parameters but the context."""

    def with_default(parameter: ast.arg, default: ast.expr | None) -> str:
        equals = "=" if parameter.annotation is None else " = "
        return source.render(parameter) + ("" if default is None else equals + source.render(default))

    others = given.args[2:]
    # Defaults are those of the last parameters.
    defaults = [*([None] * len(given.args)), *given.defaults][-len(given.args) :][2:]
    texts = ["self", *(with_default(*pair) for pair in zip(others, defaults, strict=True))]
    if given.vararg is not None or given.kwonlyargs:
        texts.append("*" if given.vararg is None else f"*{source.render(given.vararg)}")
    texts += [with_default(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*texts, *([] if given.kwarg is None else [f"**{source.render(given.kwarg)}"])]


def _rewrite_methods(source: Source, shape: TrialShape) -> None:
    methods = shape.methods
    rewrite_optimizer_steps(source, shape)
    rewrite_train_batch(source, methods["train_batch"])
    if "evaluate_batch" in methods:
        rewrite_evaluate_batch(source, methods["evaluate_batch"], methods.get("evaluation_reducer"))
    if "build_callbacks" in methods:
        rewrite_build_callbacks(source, methods["build_callbacks"])
    if "get_batch_length" in methods:
        source.rewrite_lines(methods["get_batch_length"], [])


def _append_hooks(source: Source, shape: TrialShape, reducing: list[list[str]]) -> None:
    returned = f"[{', '.join(_held(name) for name in shape.optimizers)}]"
    if shape.schedulers:
        returned += f", [{', '.join(_held(scheduler.name) for scheduler in shape.schedulers)}]"
    methods = [["def configure_optimizers(self):", f"    return {returned}"]]
    steps = [line for scheduler in shape.schedulers for line in _scheduler_lines(source, scheduler)]
    if steps:
        counted = [f"    batch_idx = {TRAINED_BATCHES}  # over all epochs"] if "batch_idx" in " ".join(steps) else []
        head = "def on_train_batch_end(self, outputs, batch, batch_idx):"
        methods.insert(0, [head, *counted, *(f"    {line}" for line in steps)])
    full = shape.methods.get("evaluate_full_dataset")
    source.append_to_class(shape.definition, [*reducing, *methods, *([] if full is None else _FULL_DATASET)])
    if full is not None and "self.device" not in source.render(full):
        source.note(full, "move the batches of the loader to self.device here")
    if full is not None and reducing:
        source.note(full, "put the hooks on_validation_epoch_end() below into one")


def _held(name: str) -> str:
    return f"*self.{name[1:]}" if name.startswith("*") else f"self.{name}"


def _scheduler_lines(source: Source, scheduler: Scheduler) -> list[str]:
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
    source.todos += 1
    return [f"# TODO: call {step} when its step mode says", "pass"]


def _comment_out_what_trains(source: Source, imports: Imports) -> set[str]:
    """Turn statements that need Determined's trainer into comments; return the names that are used nevertheless."""
    remaining: set[str] = set()
    gone: set[str] = set()
    for statement in source.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        left = [use for use in imports.uses(statement) if not imports.is_rewritten(use)]
        if isinstance(statement, ast.ClassDef):
            remaining.update(dotted(use).partition(".")[0] for use in left)
            for use in left:
                source.note(use, advice_for(imports.path_of(use)) or f"nothing replaces {dotted(use)}")
        elif left or any(isinstance(node, ast.Name) and node.id in gone for node in ast.walk(statement)):
            gone.update([statement.name] if isinstance(statement, ast.FunctionDef) else [])
            if isinstance(statement, ast.Assign):
                gone.update(dotted(target) for target in statement.targets)
            _comment_out(source, statement)
    return remaining


def _comment_out(source: Source, statement: ast.stmt) -> None:
    source.note(statement, "pl.Trainer(max_epochs=...).fit(module) replaces this")
    lines = source.render(statement).splitlines()
    source.rewrite(statement, "\n".join(f"# {line}".rstrip() for line in lines))
