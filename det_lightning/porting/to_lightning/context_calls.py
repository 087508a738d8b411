"""What a trial asks of its context, asked of Lightning or of the module itself."""

from __future__ import annotations

import ast

from det_lightning.porting.to_lightning.shape import TrialShape, argument
from det_lightning.porting.to_lightning.source import Source, attribute_of_self, dotted

#: The index of a batch over all epochs, as Determined counts; ``batch_idx`` is Lightning's.
TRAINED_BATCHES = "self.current_epoch * self.trainer.num_training_batches + batch_idx"

_GLOBAL_BATCH_SIZE = 'self.hparams["global_batch_size"]'
# Calls that become another expression.
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
_DISTRIBUTED = {
    "rank": "self.global_rank",
    "get_rank": "self.global_rank",
    "local_rank": "self.local_rank",
    "get_local_rank": "self.local_rank",
    "size": "self.trainer.world_size",
    "get_size": "self.trainer.world_size",
}
_POSITION = {"epoch_len": "self.trainer.num_training_batches", "batch_idx": "self.trainer.fit_loop.total_batch_idx"}
_UNWRAPPED = ("wrap_model", "wrap_optimizer", "wrap_lr_scheduler")
# Methods that are rewritten elsewhere.
_ELSEWHERE = ("step_optimizer", "wrap_reducer")
# Statements that are not needed, and what replaces them.
_DROPPED = {
    "use_amp": 'pass precision="16-mixed" to pl.Trainer, which replaces use_amp()',
    "disable_auto_to_device": "override transfer_batch_to_device() to leave batches where they are",
    "disable_dataset_reproducibility_checks": "",
    "set_enable_tensorboard_logging": "choose a logger for pl.Trainer",
    "set_profiler": "pass a PyTorchProfiler with these arguments as profiler= to pl.Trainer",
}


def rewrite_context(source: Source, shape: TrialShape) -> None:
    """Rewrite what a trial does with its context; what nothing can replace gets a comment."""
    for node in ast.walk(shape.definition):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and shape.is_context(node):
            _rewrite_use(source, shape, node)


def _rewrite_use(source: Source, shape: TrialShape, context: ast.expr) -> None:
    attribute = source.parent(context)
    if not isinstance(attribute, ast.Attribute):
        if not _is_passed_to_base(source, context) and not _is_kept(source, shape, context):
            source.note(context, "a LightningModule has no context; pass what is needed of it")
        return
    if attribute.attr in ("experimental", "distributed", "position"):
        inner = source.parent(attribute)
        if isinstance(inner, ast.Attribute):
            attribute = inner
    call = source.parent(attribute)
    if isinstance(call, ast.Call) and call.func is attribute:
        _rewrite_call(source, call, attribute)
    elif dotted(attribute).endswith(".distributed." + attribute.attr) and attribute.attr in _DISTRIBUTED:
        _rewrite_rank(source, attribute, attribute.attr)
    elif dotted(attribute).endswith(".position." + attribute.attr) and attribute.attr in _POSITION:
        source.rewrite(attribute, _POSITION[attribute.attr])
    elif attribute.attr == "device":
        source.rewrite(attribute, "self.device")
    else:
        source.note(context, f"there is no context here to ask for {attribute.attr}")


def _is_kept(source: Source, shape: TrialShape, context: ast.expr) -> bool:
    """Remove ``self.context = context``."""
    statement = source.parent(context)
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is not context:
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if not all(attribute_of_self(target) for target in targets):
        return False
    source.rewrite_lines(statement, [])
    return True


def _is_passed_to_base(source: Source, context: ast.expr) -> bool:
    """Return whether a context is the argument of ``super().__init__``, which is rewritten."""
    call = source.parent(context)
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"


def _rewrite_call(source: Source, call: ast.Call, method: ast.Attribute) -> None:
    name = method.attr
    in_init = _in_init(source, call)
    if name == "backward":
        source.rewrite(method, "self.manual_backward")
    elif name == "get_hparam":
        _rewrite_hparam(source, call)
    elif name in _UNWRAPPED:
        _unwrap(source, call, name)
    elif name == "get_per_slot_batch_size":
        _rewrite_batch_size(source, call, in_init)
    elif name == "to_device":
        _rewrite_to_device(source, call, in_init)
    elif name in _CALLS:
        source.rewrite(call, _CALLS[name])
    elif name in _DISTRIBUTED and ".distributed." in dotted(method):
        _rewrite_rank(source, call, name)
    elif name == "get_data_config":
        source.rewrite(call, 'self.hparams["data"]')
        source.note(call, 'pass the section "data" of the experiment configuration as data={...}')
    elif name == "get_trial_seed":
        source.rewrite(call, 'self.hparams["seed"]')
        source.note(call, "pass the seed as seed=..., and to pl.seed_everything() too")
    elif name == "set_stop_requested":
        _rewrite_stop(source, call)
    elif name in _DROPPED and isinstance(source.parent(call), ast.Expr):
        _drop(source, call, name)
    elif name not in _ELSEWHERE:
        source.note(call, f"nothing replaces context.{name}()")


def _in_init(source: Source, node: ast.AST) -> bool:
    function = source.function(node)
    return function is not None and function.name == "__init__"


def _rewrite_hparam(source: Source, call: ast.Call) -> None:
    """Write ``self.hparams[name]``; changes within the argument stay possible."""
    name = argument(call, 0, "name")
    if name is None:
        return
    start, end = source.span(call)
    first, last = source.span(name)
    source.edits.rewrite(start, first, "self.hparams[")
    source.edits.rewrite(last, end, "]")


def _unwrap(source: Source, call: ast.Call, name: str) -> None:
    """Leave what was wrapped."""
    wrapped = call.args[0] if call.args else call.keywords[0].value
    statement = source.parent(call)
    if name == "wrap_optimizer" and len(call.args) + len(call.keywords) > 1:
        source.note(call, "the other arguments of wrap_optimizer() were for several processes and aggregation")
    if isinstance(statement, ast.Expr):
        source.rewrite_lines(statement, [])
        return
    if isinstance(statement, ast.Assign) and dotted(wrapped) and dotted(statement.targets[0]) == dotted(wrapped):
        source.rewrite_lines(statement, [])
        return
    (start, end) = source.span(call)
    (first, last) = source.span(wrapped)
    source.dedent(wrapped, call)
    source.edits.rewrite(start, first, "")
    source.edits.rewrite(last, end, "")


def _rewrite_rank(source: Source, use: ast.expr, name: str) -> None:
    if name.endswith("size") and _in_init(source, use):
        source.rewrite(use, "1")
        source.note(
            use, "the number of processes is not known here; it is self.trainer.world_size, once there is a trainer"
        )
    else:
        source.rewrite(use, _DISTRIBUTED[name])


def _rewrite_batch_size(source: Source, call: ast.Call, in_init: bool) -> None:
    if in_init:
        source.rewrite(call, _GLOBAL_BATCH_SIZE)
        source.note(call, "divide by the number of processes, if there are several; it is not known here")
        return
    text = f"{_GLOBAL_BATCH_SIZE} // self.trainer.world_size"
    inside = isinstance(source.parent(call), ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Compare)
    source.rewrite(call, f"({text})" if inside else text)


def _rewrite_to_device(source: Source, call: ast.Call, in_init: bool) -> None:
    if in_init:
        source.note(call, "the device is not known here; keep tensors with register_buffer(), which moves them")
    moved = argument(call, 0, "batch") or argument(call, 0, "data")
    if moved is not None:
        (start, end) = source.span(call)
        (first, last) = source.span(moved)
        source.edits.rewrite(start, first, "self.transfer_batch_to_device(")
        source.edits.rewrite(last, end, ", self.device, 0)")


def _rewrite_stop(source: Source, call: ast.Call) -> None:
    statement = source.parent(call)
    if isinstance(statement, ast.Expr) and call.args:
        source.rewrite(call, f"self.trainer.should_stop = {source.render(call.args[0])}")
    else:
        source.note(call, "set self.trainer.should_stop = True to end the training")


def _drop(source: Source, call: ast.Call, name: str) -> None:
    statement = source.statement(call)
    if _DROPPED[name]:
        source.note(call, _DROPPED[name])
    source.rewrite_lines(statement, [])
