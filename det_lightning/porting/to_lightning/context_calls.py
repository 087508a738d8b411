"""Rewrites uses of a trial's context to members of the module and of Lightning's trainer."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from det_lightning.porting.python_syntax import called_method, dotted_name, list_targets
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self, list_statements
from det_lightning.porting.to_lightning.trial import Trial, rename_holder

_KEY = re.compile(r'\["(\w+)"\]')
# Operations that bind their parts more tightly than a replacement.
_OPERATIONS = (
    cst.BinaryOperation, cst.UnaryOperation, cst.Attribute, cst.Comparison, cst.ComparisonTarget, cst.Subscript,
    cst.Call,
)  # fmt: skip

BATCH_SIZE = 'self.hparams["global_batch_size"]'


@dataclasses.dataclass(frozen=True)
class LateValue:
    """An expression to use during training, and what replaces it before."""

    text: str
    advice: str = "not known in __init__, when there is no trainer yet; move this to setup(), or later"
    without_trainer: str = ""  # the replacement before training; empty for the same text
    needs: str = ""  # a setting of the trainer without which the expression fails


_RANK = "0 in every process here, before there is a trainer; move all that depends on the rank to setup(), or later"
_LOGGER = "pl.Trainer needs a TensorBoardLogger for this: without a logger, self.logger is None"
LATE_VALUES = {
    "rank": LateValue("self.global_rank", _RANK),
    "local_rank": LateValue("self.local_rank", _RANK),
    "size": LateValue(
        "self.trainer.world_size",
        "the number of processes is not known here; it is self.trainer.world_size, once there is a trainer",
        "1",
    ),
    "num_agents": LateValue("self.trainer.num_nodes"),
    "cross_size": LateValue("self.trainer.num_nodes"),
    "cross_rank": LateValue("self.trainer.node_rank"),
    "get_per_slot_batch_size": LateValue(
        f"{BATCH_SIZE} // self.trainer.world_size",
        "divide by the number of processes, if there are several; it is not known here",
        BATCH_SIZE,
    ),
    "device": LateValue(
        "self.device",
        "the CPU here, before there is a trainer; keep tensors with register_buffer(), to be moved",
    ),
    "get_tensorboard_writer": LateValue("self.logger.experiment", needs=_LOGGER),
    "get_tensorboard_path": LateValue("pathlib.Path(self.logger.log_dir)", needs=_LOGGER),
    "current_train_epoch": LateValue("self.current_epoch"),
    "current_train_batch": LateValue("self.trainer.fit_loop.total_batch_idx"),
    "is_epoch_start": LateValue("self.trainer.fit_loop.batch_idx == 0"),
    "is_epoch_end": LateValue("self.trainer.is_last_batch"),
    "get_stop_requested": LateValue("self.trainer.should_stop"),
    "epoch_len": LateValue("self.trainer.num_training_batches"),
    "batch_idx": LateValue("self.trainer.fit_loop.total_batch_idx"),
}


def write_late_value(trial: Trial, use: cst.BaseExpression, name: str) -> None:
    """Replace the use of a value; in ``__init__``, where the value is unknown, by a property or a comment."""
    file = trial.file
    value = LATE_VALUES[name]
    if not trial.runs_before_training(use):
        replace_expression(trial, use, value.text)
        if value.needs:
            file.todo(use, value.needs)
        return
    holder = _sole_holder(trial, use)
    if not holder:
        replace_expression(trial, use, value.without_trainer or value.text)
        file.todo(use, value.advice)
        return
    new_name = file.render(trial.find_uses(holder)[0].attr)
    file.replace_statement(file.statement(use), [])
    if value.text != f"self.{new_name}":
        trial.properties[new_name] = [*([file.todo_line(value.needs)] if value.needs else []), f"return {value.text}"]
    for other in trial.find_uses(holder):
        if trial.runs_before_training(other) and not _is_changed(trial, other):
            if value.without_trainer:
                replace_expression(trial, other, value.without_trainer)
            file.todo(other, value.advice)


def replace_expression(trial: Trial, use: cst.BaseExpression, text: str) -> None:
    """Replace an expression, with parentheses if necessary, and with attributes for keys in an f-string."""
    if any(isinstance(outer, cst.FormattedString) for outer in trial.file.ancestors(use)):
        text = _KEY.sub(r".\1", text)
    is_joined = " " in text and isinstance(trial.file.parent(use), _OPERATIONS)
    trial.file.replace(use, f"({text})" if is_joined else text)


def _sole_holder(trial: Trial, use: cst.BaseExpression) -> str:
    """Return the attribute that always and only holds a value from ``__init__`` on; empty if there is none."""
    statement = trial.file.parent(use)
    if not isinstance(statement, cst.Assign | cst.AnnAssign) or statement.value is not use:
        return ""
    names = [attribute_of_self(target) for target in list_targets(statement)]
    if len(names) != 1 or not names[0] or statement not in list_statements(trial.methods["__init__"].body):
        return ""
    return names[0] if sum(_is_changed(trial, node) for node in trial.find_uses(names[0])) == 1 else ""


def _is_changed(trial: Trial, attribute: cst.Attribute) -> bool:
    outer = trial.file.parent(attribute)
    if isinstance(outer, cst.Element):  # perhaps of several targets
        several, around, *_ = trial.file.ancestors(outer)
        return isinstance(around, cst.AssignTarget | cst.For | cst.CompFor) and around.target is several
    is_bound = isinstance(outer, cst.AssignTarget | cst.Del | cst.NamedExpr | cst.AsName)
    return is_bound or getattr(outer, "target", None) is attribute


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
