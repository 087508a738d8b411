"""Uses of a trial's context, rewritten to members of the module and of Lightning's trainer."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.python_syntax import dotted_name, targets_of
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self
from det_lightning.porting.to_lightning.trial import Trial

#: The index of a batch over all epochs, as Determined counts; ``batch_idx`` is Lightning's.
TRAINED_BATCHES = "self.current_epoch * self.trainer.num_training_batches + batch_idx"

_GLOBAL_BATCH_SIZE = 'self.hparams["global_batch_size"]'
# Methods of the context, and of its parts, that become another expression.
_CALLS = {
    "get_hparams": "self.hparams",
    "get_global_batch_size": _GLOBAL_BATCH_SIZE,
    "current_train_epoch": "self.current_epoch",
    "current_train_batch": "self.trainer.fit_loop.total_batch_idx",
    "is_epoch_start": "(self.trainer.fit_loop.batch_idx == 0)",
    "is_epoch_end": "self.trainer.is_last_batch",
    "get_stop_requested": "self.trainer.should_stop",
    "get_tensorboard_writer": "self.logger.experiment",
    "get_tensorboard_path": "self.logger.log_dir",
}
# Also with get_ before the name.
_DISTRIBUTED = {
    "rank": "self.global_rank",
    "local_rank": "self.local_rank",
    "size": "self.trainer.world_size",
}
_POSITION = {"epoch_len": "self.trainer.num_training_batches", "batch_idx": "self.trainer.fit_loop.total_batch_idx"}
_UNWRAPPED = ("wrap_model", "wrap_optimizer", "wrap_lr_scheduler")
# Methods that are rewritten elsewhere.
_ELSEWHERE = ("step_optimizer", "wrap_reducer")
# Methods that return a setting, which becomes a hyperparameter.
_SETTINGS = {
    "get_data_config": ("data", 'pass the section "data" of the experiment configuration as data={...}'),
    "get_trial_seed": ("seed", "pass the seed as seed=..., and to pl.seed_everything() too"),
}
# Statements that are not needed, and what replaces them.
_DROPPED = {
    "use_amp": 'pass precision="16-mixed" to pl.Trainer, which replaces use_amp()',
    "disable_auto_to_device": "override transfer_batch_to_device() to leave batches where they are",
    "disable_dataset_reproducibility_checks": "",
    "set_enable_tensorboard_logging": "choose a logger for pl.Trainer",
    "set_profiler": "pass a PyTorchProfiler with these arguments as profiler= to pl.Trainer",
}


def rewrite_context(trial: Trial) -> None:
    """Rewrite what a trial does with its context; what nothing can replace gets a comment."""
    file = trial.file
    for node in file.find(cst.Name, cst.Attribute, within=trial.definition):
        if trial.is_context(node) and _is_read(file, node):
            _rewrite_use(file, node)


def _is_read(file: ModuleFile, node: cst.Name | cst.Attribute) -> bool:
    """Return whether an expression is used, and not the name of an attribute, argument or parameter, or assigned to."""
    parent = file.parent(node)
    if isinstance(parent, cst.Attribute):
        return parent.value is node
    if isinstance(parent, cst.Arg):
        return parent.value is node
    return not isinstance(parent, cst.Param | cst.AssignTarget) and getattr(parent, "target", None) is not node


def _rewrite_use(file: ModuleFile, context: cst.Name | cst.Attribute) -> None:
    attribute = file.parent(context)
    if not isinstance(attribute, cst.Attribute):
        if not _is_passed_to_base(file, context) and not _remove_assignment(file, context):
            file.todo(context, "a LightningModule has no context; pass what is needed from it")
        return
    part = attribute.attr.value
    inner = file.parent(attribute)
    if part in ("experimental", "distributed", "position") and isinstance(inner, cst.Attribute):
        attribute = inner
    name = attribute.attr.value
    call = file.parent(attribute)
    if isinstance(call, cst.Call) and call.func is attribute:
        _rewrite_call(file, call, attribute)
    elif part == "distributed" and name.removeprefix("get_") in _DISTRIBUTED:
        _rewrite_rank(file, attribute, name.removeprefix("get_"))
    elif part == "position" and name in _POSITION:
        file.replace(attribute, _POSITION[name])
    elif name == "device":
        file.replace(attribute, "self.device")
    else:
        file.todo(context, f"a LightningModule has no context to get {name} from")


def _is_passed_to_base(file: ModuleFile, context: cst.BaseExpression) -> bool:
    """Return whether a context is the argument of ``super().__init__``, which is rewritten."""
    given = file.parent(context)
    call = file.parent(given) if isinstance(given, cst.Arg) else None
    return isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value == "__init__"


def _remove_assignment(file: ModuleFile, context: cst.BaseExpression) -> bool:
    """Remove ``self.context = context``; return whether a context is used in such a statement."""
    statement = file.parent(context)
    if not isinstance(statement, cst.Assign | cst.AnnAssign) or statement.value is not context:
        return False
    if not all(attribute_of_self(target) for target in targets_of(statement)):
        return False
    file.replace_statement(statement, [])
    return True


def _rewrite_call(file: ModuleFile, call: cst.Call, method: cst.Attribute) -> None:
    name = method.attr.value
    if name == "backward":
        file.replace(method, "self.manual_backward")
    elif name == "get_hparam":
        if key := argument(call, 0, "name"):
            file.replace_around(call, key, "self.hparams[", "]")
    elif name in _UNWRAPPED:
        _unwrap(file, call, name)
    elif name == "get_per_slot_batch_size":
        _rewrite_batch_size(file, call)
    elif name == "to_device":
        _rewrite_to_device(file, call)
    elif name in _CALLS:
        file.replace(call, _CALLS[name])
    elif name.removeprefix("get_") in _DISTRIBUTED and ".distributed." in dotted_name(method):
        _rewrite_rank(file, call, name.removeprefix("get_"))
    elif name in _SETTINGS:
        setting, advice = _SETTINGS[name]
        file.replace(call, f'self.hparams["{setting}"]')
        file.todo(call, advice)
    elif name == "set_stop_requested":
        _rewrite_stop(file, call)
    elif name in _DROPPED and isinstance(file.parent(call), cst.Expr):
        if _DROPPED[name]:
            file.todo(call, _DROPPED[name])
        file.replace_statement(file.statement(call), [])
    elif name not in _ELSEWHERE:
        file.todo(call, f"nothing replaces context.{name}()")


def _in_init(file: ModuleFile, node: cst.CSTNode) -> bool:
    function = file.function(node)
    return function is not None and function.name.value == "__init__"


def _unwrap(file: ModuleFile, call: cst.Call, name: str) -> None:
    wrapped = call.args[0].value
    statement = file.parent(call)
    if name == "wrap_optimizer" and len(call.args) > 1:
        file.todo(call, "the other arguments of wrap_optimizer() were for several processes and aggregation")
    is_same = isinstance(statement, cst.Assign) and dotted_name(targets_of(statement)[0]) == dotted_name(wrapped) != ""
    if isinstance(statement, cst.Expr) or is_same:
        file.replace_statement(file.statement(call), [])
    else:
        file.dedent(wrapped, call)
        file.replace_around(call, wrapped, "", "")


def _rewrite_rank(file: ModuleFile, use: cst.BaseExpression, name: str) -> None:
    if name == "size" and _in_init(file, use):
        file.replace(use, "1")
        file.todo(
            use, "the number of processes is not known here; it is self.trainer.world_size, once there is a trainer"
        )
    else:
        file.replace(use, _DISTRIBUTED[name])


def _rewrite_batch_size(file: ModuleFile, call: cst.Call) -> None:
    if _in_init(file, call):
        file.replace(call, _GLOBAL_BATCH_SIZE)
        file.todo(call, "divide by the number of processes, if there are several; it is not known here")
        return
    text = f"{_GLOBAL_BATCH_SIZE} // self.trainer.world_size"
    operations = cst.BinaryOperation | cst.UnaryOperation | cst.Attribute | cst.Comparison | cst.ComparisonTarget
    file.replace(call, f"({text})" if isinstance(file.parent(call), operations) else text)


def _rewrite_to_device(file: ModuleFile, call: cst.Call) -> None:
    if _in_init(file, call):
        file.todo(call, "the device is not known here; keep tensors with register_buffer(), which moves them")
    if moved := argument(call, 0, "batch") or argument(call, 0, "data"):
        file.replace_around(call, moved, "self.transfer_batch_to_device(", ", self.device, 0)")


def _rewrite_stop(file: ModuleFile, call: cst.Call) -> None:
    if isinstance(file.parent(call), cst.Expr) and call.args and call.args[0].keyword is None:
        file.replace(call, f"self.trainer.should_stop = {file.render(call.args[0].value)}")
    else:
        file.todo(call, "set self.trainer.should_stop = True to end the training")
