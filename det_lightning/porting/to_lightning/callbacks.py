"""A trial's callbacks, rewritten as Lightning callbacks."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, last_name, methods_of, parameter_names
from det_lightning.porting.to_lightning.module_file import ModuleFile

_BASE = "pl.Callback"
# By hook: Lightning's, and where the values of its parameters come from.
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
_STAGED = ("teardown",)
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
    """Rewrite a class that derives from ``PyTorchCallback``."""
    for base in definition.bases:
        if last_name(base.value) == "PyTorchCallback":
            file.replace(base.value, _BASE)
    for method in methods_of(definition):
        if method.name.value in _HOOKS:
            _rewrite_hook(file, method)
        elif method.name.value in _OF_DETERMINED:
            file.todo(method, f"Lightning has no such hook: {_OF_DETERMINED[method.name.value]}")


def _rewrite_hook(file: ModuleFile, method: cst.FunctionDef) -> None:
    name, values = _HOOKS[method.name.value]
    if name == "on_train_epoch_end":
        file.todo(method, "Lightning calls this after the validation of the epoch, Determined did before")
    if name == "on_validation_end" and not _takes_by_name(file, method):
        file.todo(method, "metrics holds those of training too, by the names that they are logged with")
    stage = ", stage" if name in _STAGED else ""
    file.replace_signature(method, f"def {name}(self, trainer, pl_module{stage})")
    used = {name.value for name in file.names(within=method)}
    given = parameter_names(method)[1:]
    lines = [f"{given} = {value}" for given, value in zip(given, values, strict=False) if given in used]
    if lines:
        file.insert_in_body(method, lines)


def _takes_by_name(file: ModuleFile, method: cst.FunctionDef) -> bool:
    """Return whether a method only reads single metrics by name."""
    given = parameter_names(method)[1:]
    uses = [name for name in file.names(within=method) if name.value in given]
    return all(isinstance(file.parent(use), cst.Subscript) for use in uses)


def rewrite_build_callbacks(file: ModuleFile, method: cst.FunctionDef) -> None:
    """Write ``configure_callbacks``, which returns a list."""
    file.replace_signature(method, "def configure_callbacks(self)")
    _mark_foreign_callbacks(file, method)
    for returned in file.find(cst.Return, within=method):
        value = returned.value
        if isinstance(value, cst.Dict):
            kept = [element.value for element in value.elements if not _clips(file, element.value)]
            file.replace(value, f"[{', '.join(file.render(callback) for callback in kept)}]")
        elif value is not None:
            file.replace(value, f"list({file.render(value)}.values())")


def _mark_foreign_callbacks(file: ModuleFile, method: cst.FunctionDef) -> None:
    """Mark callbacks from other files, which must be rewritten as Lightning callbacks too."""
    own = {definition.name.value for definition in file.find(cst.ClassDef)}
    for call in file.find(cst.Call, within=method):
        made = call.func
        is_made = isinstance(file.parent(call), cst.DictElement) and bool(dotted_name(made))
        if is_made and last_name(made) not in own | set(_CLIPPING) and not dotted_name(made).startswith("self."):
            file.todo(call, f"{last_name(made)} must be a pl.Callback")


def _clips(file: ModuleFile, callback: cst.BaseExpression) -> bool:
    """Return whether a callback is one of Determined's that clip, and note what replaces it."""
    name = last_name(callback.func) if isinstance(callback, cst.Call) else ""
    if name not in _CLIPPING or not isinstance(callback, cst.Call):
        return False
    positional = [given.value for given in callback.args if given.keyword is None]
    limit = ", ".join(" ".join(file.render(value).split()) for value in positional) or "..."
    file.todo(
        callback,
        "call this in training_step(), before optimizer.step(): self.clip_gradients(optimizer, "
        f'gradient_clip_val={limit}, gradient_clip_algorithm="{_CLIPPING[name]}")',
    )
    return True
