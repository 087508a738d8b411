"""Rewrites uses of a trial's context to members of the module and of Lightning's trainer."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.python_syntax import called_method, dotted_name, list_targets
from det_lightning.porting.to_lightning.late_values import BATCH_SIZE, LATE_VALUES, replace_expression, write_late_value
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self
from det_lightning.porting.to_lightning.trial import Trial

#: The index of a batch over all epochs, as Determined counts; ``batch_idx`` is Lightning's.
TRAINED_BATCHES = "self.current_epoch * self.trainer.num_training_batches + batch_idx"

_UNWRAPPED = ("wrap_model", "wrap_optimizer", "wrap_lr_scheduler")
# Methods rewritten elsewhere.
_ELSEWHERE = (*_UNWRAPPED, "step_optimizer", "wrap_reducer")
# Methods returning a setting, to be a hyperparameter.
_SETTINGS = {
    "get_data_config": ("data", 'pass the section "data" of the experiment configuration as data={...}'),
    "get_trial_seed": ("trial_seed", "pass the seed as trial_seed=..., and to pl.seed_everything() too"),
}
# Needless statements, and the replacements.
_DROPPED = {
    "use_amp": 'pass precision="16-mixed" to pl.Trainer, which replaces use_amp()',
    "disable_auto_to_device": "override transfer_batch_to_device() to leave batches where they are",
    "disable_dataset_reproducibility_checks": "",
    "set_enable_tensorboard_logging": "choose a logger for pl.Trainer",
    "set_profiler": "pass a PyTorchProfiler with these arguments as profiler= to pl.Trainer",
}
_ADVICE = {
    "allgather": "self.all_gather() gathers tensors, torch.distributed.all_gather_object() other values",
    "gather": "self.all_gather() gathers tensors, torch.distributed.gather_object() other values",
    "wrap_scaler": 'leave the scaler out, and pass precision="16-mixed" to pl.Trainer, which scales gradients itself',
}


def rewrite_context(trial: Trial) -> None:
    """Rewrite the uses of a trial's context; a use without replacement gets a comment."""
    file = trial.file
    found = file.find(cst.Name, cst.Attribute, within=trial.definition)
    # Reversed: the arguments of a call come before the call.
    for node in reversed([node for node in found if trial.is_context(node) and _is_read(file, node)]):
        _rewrite_use(trial, node)
    trial.render_frequencies()
    for name in _UNWRAPPED:
        for call in reversed(list(trial.context_calls(name))):
            _unwrap(file, call, name)


def _is_read(file: ModuleFile, node: cst.Name | cst.Attribute) -> bool:
    """Return whether an expression is read, not assigned to or the name of an attribute, argument or parameter."""
    parent = file.parent(node)
    if isinstance(parent, cst.Attribute | cst.Arg):
        return parent.value is node
    return not isinstance(parent, cst.Param | cst.AssignTarget) and getattr(parent, "target", None) is not node


def _rewrite_use(trial: Trial, context: cst.Name | cst.Attribute) -> None:
    file = trial.file
    attribute = file.parent(context)
    if not isinstance(attribute, cst.Attribute):
        call = file.parent(attribute)
        is_passed_to_base = isinstance(call, cst.Call) and calls_init_of_trial(call)  # rewritten elsewhere
        if not is_passed_to_base and not _remove_assignment(trial, context):
            file.todo(context, "a LightningModule has no context; pass the needed values")
        return
    part = attribute.attr.value
    inner = file.parent(attribute)
    if part in ("experimental", "distributed", "position") and isinstance(inner, cst.Attribute):
        attribute = inner
    else:
        part = ""
    name = attribute.attr.value
    call = file.parent(attribute)
    if isinstance(call, cst.Call) and call.func is attribute:
        _rewrite_call(trial, call, part, name)
    elif name in LATE_VALUES and (part or name == "device"):
        write_late_value(trial, attribute, name)
    elif name == "get_hparam":  # under a shorter name
        file.replace(attribute, "self.hparams.__getitem__")
    else:
        file.todo(context, f"a LightningModule has no context to get {name} from")


def calls_init_of_trial(call: cst.Call) -> bool:
    """Return whether a call is ``super().__init__(...)``, or ``__init__`` of a base class with Determined's name."""
    base = call.func.value if isinstance(call.func, cst.Attribute) else None
    is_super = isinstance(base, cst.Call) and dotted_name(base.func) == "super"
    return called_method(call) == "__init__" and (is_super or dotted_name(base).endswith("PyTorchTrial"))


def _remove_assignment(trial: Trial, context: cst.BaseExpression) -> bool:
    """Remove ``self.context = context``; return whether the context is used in such a statement."""
    statement = trial.file.parent(context)
    if not isinstance(statement, cst.Assign | cst.AnnAssign) or statement.value is not context:
        return False
    if not all(attribute_of_self(target) or trial.is_context(target) for target in list_targets(statement)):
        return False
    trial.file.replace_statement(statement, [])
    return True


def _rewrite_call(trial: Trial, call: cst.Call, part: str, name: str) -> None:
    file = trial.file
    value = name.removeprefix("get_") if part == "distributed" else name
    if name == "backward":
        file.replace(call.func, "self.manual_backward")
    elif name == "get_hparam":
        _rewrite_hparam(file, call)
    elif name == "get_hparams":
        _rewrite_hparams(trial, call)
    elif name == "get_global_batch_size":
        replace_expression(trial, call, BATCH_SIZE)
    elif name == "to_device":
        _rewrite_to_device(trial, call)
    elif value in LATE_VALUES:
        write_late_value(trial, call, value)
    elif name in _SETTINGS:
        setting, advice = _SETTINGS[name]
        replace_expression(trial, call, f'self.hparams["{setting}"]')
        file.todo(call, advice)
    elif name == "set_stop_requested":
        _rewrite_stop(trial, call)
    elif part == "distributed" and name == "broadcast" and not trial.runs_before_training(call):
        file.replace(call.func, "self.trainer.strategy.broadcast")
    elif name in _DROPPED and isinstance(file.parent(call), cst.Expr):
        if _DROPPED[name]:
            file.todo(call, _DROPPED[name])
        file.replace_statement(file.statement(call), [])
    elif name not in _ELSEWHERE:
        what = f"nothing replaces context.{part}{'.' if part else ''}{name}()"
        file.todo(call, f"{what}; {_ADVICE[name]}" if name in _ADVICE else what)


def _rewrite_hparam(file: ModuleFile, call: cst.Call) -> None:
    key = argument(call, 0, "name")
    if key is None or len(call.args) > 1:
        file.todo(call, "self.hparams replaces context.get_hparam()")
        return
    file.replace_around(call, key, "self.hparams[", "]")
    if any(isinstance(outer, cst.Try) and outer.handlers for outer in file.ancestors(call)):
        file.todo(call, "a missing hyperparameter raises a KeyError; of a context it was a ValueError")


def _rewrite_hparams(trial: Trial, call: cst.Call) -> None:
    """Replace all hyperparameters except those added for other settings."""
    outer = trial.file.parent(call)
    settings = find_settings(trial)
    if not settings or isinstance(outer, cst.Subscript | cst.Attribute):
        trial.file.replace(call, "self.hparams")
        return
    left_out = ", ".join(f'"{name}"' for name in settings)
    trial.file.replace(call, f"{{name: self.hparams[name] for name in self.hparams if name not in [{left_out}]}}")


def find_settings(trial: Trial) -> list[str]:
    """Return the hyperparameters of the module that stand for other settings of the trial."""
    return [name for method, (name, _) in _SETTINGS.items() if trial.calls_context(method)]


def _unwrap(file: ModuleFile, call: cst.Call, name: str) -> None:
    if not call.args:
        file.todo(call, f"nothing replaces context.{name}() without an argument")
        return
    wrapped = call.args[0].value
    statement = file.parent(call)
    if name == "wrap_optimizer" and len(call.args) > 1:
        file.todo(call, "the other arguments of wrap_optimizer() were for several processes and aggregation")
    holder = dotted_name(list_targets(statement)[0]) if isinstance(statement, cst.Assign) else dotted_name(wrapped)
    is_needless = isinstance(statement, cst.Expr | cst.Assign) and holder == dotted_name(wrapped) != ""
    if is_needless:
        file.replace_statement(file.statement(call), [])
    else:
        file.dedent(wrapped, call)
        file.replace_around(call, wrapped, "", "")


def _rewrite_to_device(trial: Trial, call: cst.Call) -> None:
    if trial.runs_before_training(call):
        trial.file.todo(call, LATE_VALUES["device"].advice)
    if moved := argument(call, 0, "batch") or argument(call, 0, "data"):
        trial.file.replace_around(call, moved, "self.transfer_batch_to_device(", ", self.device, 0)")


def _rewrite_stop(trial: Trial, call: cst.Call) -> None:
    file = trial.file
    if not isinstance(file.parent(call), cst.Expr) or not call.args:
        file.todo(call, "set self.trainer.should_stop = True to end the training")
        return
    file.replace_around(call, call.args[0].value, "self.trainer.should_stop = ", "")
    if any(outer in trial.find_reached("train_batch") for outer in file.ancestors(call)):
        file.todo(call, "Lightning stops after this batch, Determined did at the end of a report, validation or epoch")
