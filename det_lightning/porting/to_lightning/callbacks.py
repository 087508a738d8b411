"""Callbacks of a trial, as callbacks of Lightning."""

from __future__ import annotations

import ast

from det_lightning.porting.to_lightning.source import Source, dotted

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


def rewrite_callback(source: Source, definition: ast.ClassDef) -> None:
    """Rewrite a class that derives from ``PyTorchCallback``."""
    for base in definition.bases:
        if dotted(base).rpartition(".")[2] == "PyTorchCallback":
            source.rewrite(base, _BASE)
    for method in definition.body:
        if isinstance(method, ast.FunctionDef) and method.name in _HOOKS:
            _rewrite_hook(source, method)
        elif isinstance(method, ast.FunctionDef) and method.name in _OF_DETERMINED:
            source.note(method, f"Lightning has no such hook: {_OF_DETERMINED[method.name]}")


def _rewrite_hook(source: Source, method: ast.FunctionDef) -> None:
    name, values = _HOOKS[method.name]
    start, end = source.signature(method)
    stage = ", stage" if name in _STAGED else ""
    source.edits.rewrite(start, end, f"def {name}(self, trainer, pl_module{stage})")
    used = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
    given = [parameter.arg for parameter in method.args.args[1:]]
    lines = [f"{given} = {value}" for given, value in zip(given, values, strict=False) if given in used]
    if lines:
        source.insert_in_body(method, lines)


def rewrite_build_callbacks(source: Source, method: ast.FunctionDef) -> None:
    """Write ``configure_callbacks``, which returns a list."""
    start, end = source.signature(method)
    source.edits.rewrite(start, end, "def configure_callbacks(self)")
    for node in ast.walk(method):
        if isinstance(node, ast.Return) and node.value is not None:
            if isinstance(node.value, ast.Dict):
                kept = [value for value in node.value.values if not _clips(source, value)]
                text = ", ".join(source.render(value) for value in kept)
                source.rewrite(node.value, f"[{text}]")
            else:
                source.rewrite(node.value, f"list({source.render(node.value)}.values())")


def _clips(source: Source, callback: ast.expr) -> bool:
    """Return whether a callback is one of Determined's that clip, and note what replaces it."""
    name = dotted(callback.func).rpartition(".")[2] if isinstance(callback, ast.Call) else ""
    if name not in _CLIPPING or not isinstance(callback, ast.Call):
        return False
    limit = ", ".join(" ".join(source.render(given).split()) for given in callback.args) or "..."
    source.note(
        callback,
        "call this in training_step(), before optimizer.step(): self.clip_gradients(optimizer, "
        f'gradient_clip_val={limit}, gradient_clip_algorithm="{_CLIPPING[name]}")',
    )
    return True
