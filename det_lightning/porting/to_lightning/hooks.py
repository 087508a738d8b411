"""Writes the module's hooks, and rewrites a trial's callbacks as Lightning's."""

from __future__ import annotations

import re
from typing import NamedTuple

import libcst as cst

from det_lightning.porting.python_syntax import base_names, dotted_name, last_name, list_methods, parameter_names
from det_lightning.porting.to_lightning.context_calls import TRAINED_BATCHES
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self
from det_lightning.porting.to_lightning.trial import Scheduler, Trial

_COMPUTED = re.compile(r"[^\w.]")
_FIND_OPTIMIZER = [
    "def lightning_optimizer(self, optimizer):",
    "    held = self.optimizers()",
    "    return next(",
    "        found for found in (held if isinstance(held, list) else [held]) if found.optimizer is optimizer",
    "    )",
]
# Lightning creates an iterator per epoch; Determined created one, with a single draw from torch's random state.
_ONE_DRAW = [
    "def on_train_epoch_end(self):",
    "    # The iterator of the next epoch draws from this, so that torch's random state stays as it is.",
    "    generator = torch.Generator().manual_seed(torch.initial_seed() + self.current_epoch)",
    "    self.trainer.train_dataloader.generator = generator",
]
_KEPT_GRADIENTS = ["def on_validation_model_zero_grad(self):", "    pass  # gradients outlive a validation"]
# The loader is the only batch of another loader, without a draw from torch's random state.
_FULL_DATASET = [
    [
        "def val_dataloader(self):",
        "    # One batch: the loader itself, which evaluate_full_dataset() goes over.",
        "    loader = self.build_validation_data_loader()",
        "    return torch.utils.data.DataLoader([loader], batch_size=None, generator=torch.Generator())",
    ],
    [
        "def validation_step(self, loader, batch_idx):",
        "    self.log_dict(self.evaluate_full_dataset(loader), batch_size=1, rank_zero_only=True)",
    ],
]

_COLLECTED = '''\
class CollectedValues:
    """Keeps values, and computes a metric from all of them."""

    def __init__(self, reduce):
        self.reduce = reduce
        self.reset()

    def reset(self):
        self.values = []

    def update(self, value):
        self.values.append(value)

    def compute(self):
        return self.reduce(self.values)


'''
_OF_ONE_PROCESS = "these values are of one process; use torchmetrics for several processes, and in training steps"


class _Reducer(NamedTuple):
    holder: str
    log_line: str
    is_function: bool
    for_validation: bool


def rewrite_reducers(trial: Trial) -> list[list[str]]:
    """Rewrite wrapped reducers, and return the hooks for the reducers, each as a list of lines."""
    file = trial.file
    functions = {function.name.value for function in file.find(cst.FunctionDef)}
    found = [_rewrite_reducer(trial, call, functions) for call in trial.context_calls("wrap_reducer")]
    if any(reducer is not None and reducer.is_function for reducer in found):
        file.edits.insert(file.edits.offset(file.first_line(trial.definition), 0), _COLLECTED, first=True)
    for definition in file.find(cst.ClassDef):
        if base_names(definition) == ["MetricReducer"]:
            start, end = file.span(definition.bases[0].value)
            file.edits.replace(file.text.rindex("(", 0, start), file.text.index(")", end) + 1, "")
    reducers = [reducer for reducer in found if reducer is not None and reducer.for_validation]
    if not reducers:
        return []
    resets = ["def on_validation_epoch_start(self):", *(f"    self.{reducer.holder}.reset()" for reducer in reducers)]
    note = f"    {file.todo_line(_OF_ONE_PROCESS)}"
    return [resets, ["def on_validation_epoch_end(self):", note, *(f"    {reducer.log_line}" for reducer in reducers)]]


def _rewrite_reducer(trial: Trial, call: cst.Call, functions: set[str]) -> _Reducer | None:
    reducer = argument(call, 0, "reducer")
    name = argument(call, 1, "name")
    statement = trial.file.parent(call)
    target = statement.targets[0].target if isinstance(statement, cst.Assign) else None
    holder = trial.file.render(target).removeprefix("self.") if target and attribute_of_self(target) else ""
    for_validation = dotted_name(argument(call, 3, "for_validation")) != "False"
    if not for_validation:
        trial.file.todo(call, "reset this reducer in training, and log the reduced value")
    is_function = isinstance(reducer, cst.Lambda) or last_name(reducer) in functions
    if reducer is None or not holder or not (is_function or isinstance(reducer, cst.Call)):
        trial.file.todo(call, "use a metric of torchmetrics; reset, update and log it in the hooks of this module")
        is_function = False
        holder = ""
    if reducer is not None:
        trial.file.replace_around(call, reducer, "CollectedValues(" if is_function else "", ")" if is_function else "")
    if not holder:
        return None
    held = f"self.{holder}"
    value = f"{held}.compute()" if is_function else f"{held}.cross_slot_reduce([{held}.per_slot_reduce()])"
    log_line = f"self.log_dict({value})"
    if name is not None and dotted_name(name) != "None":
        log_line = f"self.log({trial.file.render(name)}, float({value}))"
    return _Reducer(holder, log_line, is_function, for_validation)


def append_hooks(trial: Trial, reducing: list[list[str]]) -> None:
    """Append properties and hooks to the class; ``reducing`` are the hooks for reducers."""
    methods = [
        ["@property", f"def {name}(self):", *(f"    {line}" for line in lines)]
        for name, lines in trial.properties.items()
    ]
    if full_dataset := trial.methods.get("evaluate_full_dataset"):
        if "self.device" not in trial.file.render(full_dataset):
            trial.file.todo(full_dataset, "move the batches of the loader to self.device here")
        if reducing:
            trial.file.todo(full_dataset, "update the reducers of on_validation_epoch_end() here")
        methods += _FULL_DATASET
    methods += reducing
    if trial.models:
        # Lightning keeps the mode of modules; Determined put wrapped models into training mode.
        lines = [line for holder in trial.models for line in _lines_for_each(holder, "model", "train()")]
        methods.append(["def on_train_epoch_start(self):", *(f"    {line}" for line in lines)])
    if not trial.calls_context("disable_dataset_reproducibility_checks"):
        methods.append(_ONE_DRAW)
    methods.append(_KEPT_GRADIENTS)
    steps = [line for scheduler in trial.schedulers for line in _scheduler_lines(trial.file, scheduler)]
    if steps:
        counted = [f"    batch_idx = {TRAINED_BATCHES}  # over all epochs"] if "batch_idx" in " ".join(steps) else []
        head = "def on_train_batch_end(self, outputs, batch, batch_idx):"
        methods.append([head, *counted, *(f"    {line}" for line in steps)])
    if trial.finds_optimizers:
        methods.append(_FIND_OPTIMIZER)
    returned = f"[{', '.join(trial.optimizers)}]"
    if trial.schedulers:
        returned += f", [{', '.join(scheduler.holder for scheduler in trial.schedulers)}]"
    methods.append(["def configure_optimizers(self):", f"    return {returned}"])
    trial.file.append_to_class(trial.definition, methods)


def _lines_for_each(holder: str, variable: str, call: str) -> list[str]:
    if holder.startswith("*"):
        return [f"for {variable} in {holder[1:]}:", f"    {variable}.{call}"]
    return [f"{holder}.{call}"]


def _scheduler_lines(file: ModuleFile, scheduler: Scheduler) -> list[str]:
    lines = _lines_for_each(scheduler.holder, "scheduler", "step()")
    every = f"({scheduler.every})" if _COMPUTED.search(scheduler.every) else scheduler.every
    if scheduler.mode == "MANUAL_STEP":
        return []
    if scheduler.mode == "STEP_EVERY_EPOCH":
        at_epochs = "" if every == "1" else f" and (self.current_epoch + 1) % {every} == 0"
        condition = f"self.trainer.is_last_batch{at_epochs}"
    elif scheduler.mode in ("STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP"):
        condition = "" if every == "1" else f"(batch_idx + 1) % {every} == 0"
    else:
        held = scheduler.holder.removeprefix("*")
        return [file.todo_line(f"call {held}.step() when its step mode says"), "pass"]
    return [f"if {condition}:", *(f"    {line}" for line in lines)] if condition else lines


# A trial's callbacks, rewritten as Lightning callbacks


# By Determined's hook: Lightning's hook, and the values for the parameters.
_HOOKS: dict[str, tuple[str, list[str]]] = {
    "on_training_start": ("on_train_start", []),
    "on_training_epoch_start": ("on_train_epoch_start", ["trainer.current_epoch"]),
    "on_training_epoch_end": ("on_train_epoch_end", ["trainer.current_epoch"]),
    "on_validation_start": ("on_validation_start", []),
    "on_validation_epoch_start": ("on_validation_epoch_start", []),
    "on_validation_end": (
        "on_validation_end",
        ["{name: value.item() for name, value in trainer.callback_metrics.items()}"],
    ),
    "on_trial_shutdown": ("teardown", []),
}
_OF_DETERMINED = {
    "on_trial_startup": "write setup(), which Lightning calls before the loaders are built",
    "on_training_workload_end": "write on_train_batch_end(), or a logger",
    "on_validation_epoch_end": "collect what validation_step() computes, and write on_validation_epoch_end()",
    "on_checkpoint_load_start": "write on_load_checkpoint()",
    "on_checkpoint_save_start": "write on_save_checkpoint()",
    "on_checkpoint_write_end": "subclass ModelCheckpoint",
    "on_checkpoint_upload_end": "subclass ModelCheckpoint",
    "on_checkpoint_end": "subclass ModelCheckpoint",
    "on_before_optimizer_step": "clip in training_step()",
}
_CLIPPING = {"ClipGradsL2Norm": "norm", "ClipGradsL2Value": "value"}


def rewrite_callback(file: ModuleFile, definition: cst.ClassDef) -> None:
    """Rewrite a class derived from ``PyTorchCallback``."""
    file.replace_base(definition, "PyTorchCallback", "pl.Callback")
    for method in list_methods(definition):
        if method.name.value in _HOOKS:
            _rewrite_hook(file, method)
        elif method.name.value in _OF_DETERMINED:
            file.todo(method, f"Lightning has no such hook: {_OF_DETERMINED[method.name.value]}")


def _rewrite_hook(file: ModuleFile, method: cst.FunctionDef) -> None:
    name, values = _HOOKS[method.name.value]
    given = parameter_names(method)[1:]
    uses = [use for use in file.names(within=method) if use.value in given]
    if name == "on_train_epoch_end":
        file.todo(method, "Lightning calls this after the validation of the epoch, Determined did before")
    if name == "on_validation_end" and not all(isinstance(file.parent(use), cst.Subscript) for use in uses):
        file.todo(method, "metrics also has the metrics of training, by the logged names")
    stage = ", stage" if name == "teardown" else ""
    file.replace_signature(method, f"def {name}(self, trainer, pl_module{stage})")
    used = {use.value for use in uses}
    lines = [f"{own} = {value}" for own, value in zip(given, values, strict=False) if own in used]
    if lines:
        file.insert_in_body(method, lines)


def rewrite_build_callbacks(file: ModuleFile, method: cst.FunctionDef) -> None:
    """Write ``configure_callbacks``, returning a list."""
    file.replace_signature(method, "def configure_callbacks(self)")
    # Callbacks from other files must be rewritten as Lightning callbacks too.
    own = {definition.name.value for definition in file.find(cst.ClassDef)}
    for call in file.find(cst.Call, within=method):
        made = dotted_name(call.func)
        is_made = isinstance(file.parent(call), cst.DictElement) and made and not made.startswith("self.")
        if is_made and last_name(call.func) not in own | set(_CLIPPING):
            file.todo(call, f"{last_name(call.func)} must be a pl.Callback")
    for returned in file.find(cst.Return, within=method):
        value = returned.value
        if isinstance(value, cst.Dict):
            kept = [element.value for element in value.elements if not _clips(file, element.value)]
            file.replace(value, f"[{', '.join(file.render(callback) for callback in kept)}]")
        elif value is not None:
            file.replace(value, f"list({file.render(value)}.values())")


def _clips(file: ModuleFile, callback: cst.BaseExpression) -> bool:
    """Return whether a callback is one of Determined's for clipping, and note its replacement."""
    if not isinstance(callback, cst.Call) or last_name(callback.func) not in _CLIPPING:
        return False
    positional = [given.value for given in callback.args if given.keyword is None]
    limit = ", ".join(" ".join(file.render(value).split()) for value in positional) or "..."
    file.todo(
        callback,
        "call this in training_step(), before optimizer.step(): self.clip_gradients(optimizer, "
        f'gradient_clip_val={limit}, gradient_clip_algorithm="{_CLIPPING[last_name(callback.func)]}")',
    )
    return True
