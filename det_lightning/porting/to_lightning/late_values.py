"""Values that a context knows from the start, and a LightningModule only once it has a trainer."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from det_lightning.porting.python_syntax import list_targets
from det_lightning.porting.to_lightning.module_file import attribute_of_self, list_statements
from det_lightning.porting.to_lightning.trial import Trial

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
