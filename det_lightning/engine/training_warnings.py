"""Warnings at the start of a run: settings with an unexpected effect, and parts without a wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from det_lightning.checkpoint.format.content import CheckpointContent, TrialState
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.core._task import current_task
from det_lightning.distributed.backend import list_parameters
from det_lightning.engine.schedule import Schedule
from det_lightning.escaping import get_logger
from det_lightning.masking import MASK
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext

logger = get_logger(__name__)

_MOST_NAMES = 5


def warn_of_settings(
    trial: object,
    context: PyTorchTrialContext,
    schedule: Schedule,
    state: TrialState,
    resumed: CheckpointContent | None,
) -> None:
    """Log the warnings of a run on the chief, after the checkpoint, if any, is loaded."""
    if context.distributed.rank != 0:
        return
    warnings = [*find_unwrapped_parameters(trial, context), *find_unwrapped_schedulers(trial, context)]
    if resumed is not None and (changed := _find_changed_hparams(resumed, context)):
        warnings.append(f"The hparams differ from those of checkpoint {resumed.name}: {', '.join(changed)}.")
    for period in schedule.find_periods_below_one():
        warnings.append(f"{period} is below 1, and so due every time; leave the period out for never.")
    if schedule.is_complete(state):
        length = "test_mode" if schedule.test_mode else f"max_length={schedule.max_length}"
        warnings.append(
            f"Nothing is trained: {length} is reached after {state.batches_trained} batches and {state.epochs_trained} "
            "epochs. To continue, pass a larger max_length, which counts from the first batch of the first run."
        )
    for message in warnings:
        logger.warning("%s", message)


def report_cut_validation(context: PyTorchTrialContext, steps_completed: int, batches: int) -> None:
    """Say, in an experiment also to its runner, that a smoke run left out the rest of a validation."""
    if context.distributed.rank != 0:
        return
    message = f"This smoke run ended the validation after its first {batches} batches: there are no metrics."
    logger.warning("%s", message)
    if (task := current_task()) is not None:
        task.report("message", steps_completed, {"text": message})


def _find_changed_hparams(resumed: CheckpointContent, context: PyTorchTrialContext) -> list[str]:
    """Return the names of the hyperparameters that differ from those in a checkpoint, as far as it has them."""
    saved = read_settings(resumed.resume, resumed.load_data)["hparams"]
    if not isinstance(saved, dict):
        return []
    # By their text, since NaN is not equal to itself.
    before, now = (
        {name: repr(value) for name, value in hparams.items()}
        for hparams in (saved, context.settings.to_plain()["hparams"] or {})
    )
    different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [name for name in different if MASK not in before.get(name, "")]  # earlier releases masked some


def find_unwrapped_parameters(trial: object, context: PyTorchTrialContext) -> Iterator[str]:
    """Yield a message for each wrapped optimizer that updates parameters of no wrapped model."""
    known = {parameter for model in context.models for parameter in model.parameters()}
    known |= {*context.precision.scaling.masters}
    names = dict(_name_parameters(trial))
    for index, optimizer in enumerate(context.optimizers):
        unknown = [parameter for parameter in list_parameters(optimizer) if parameter not in known]
        if not unknown:
            continue
        shown = [names.get(parameter, f"one of shape {tuple(parameter.shape)}") for parameter in unknown[:_MOST_NAMES]]
        more = ", ..." if len(unknown) > _MOST_NAMES else ""
        yield (
            f"Optimizer {index}, a {type(optimizer).__name__}, updates {len(unknown)} parameters of no wrapped model: "
            f"{', '.join(shown)}{more}. The parameters are trained, but not saved in checkpoints and not exchanged "
            "between ranks. Pass their model through context.wrap_model() in the trial's __init__."
        )


def _name_parameters(trial: object) -> Iterator[tuple[torch.nn.Parameter, str]]:
    for attribute, value in vars(trial).items():
        if isinstance(value, torch.nn.Parameter):
            yield value, attribute
        for part in _list_parts(value):
            if isinstance(part, torch.nn.Module):
                yield from ((parameter, f"{attribute}.{name}") for name, parameter in part.named_parameters())


def _list_parts(value: Any) -> Iterable[Any]:
    """Return an attribute of a trial, or the items of a list, a tuple or a dict."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def find_unwrapped_schedulers(trial: object, context: PyTorchTrialContext) -> Iterator[str]:
    """Yield a message for each scheduler of the trial that sets the learning rate of a wrapped optimizer."""
    wrapped = [scheduler.scheduler for scheduler in context.lr_schedulers]
    kept = {
        id(part): (attribute, part)
        for attribute, value in vars(trial).items()
        for part in _list_parts(value)
        if isinstance(part, LRScheduler)
    }
    inner = [one for scheduler in (*wrapped, *(part for _, part in kept.values())) for one in _find_inner(scheduler)]
    for one in (*wrapped, *inner):
        kept.pop(id(one), None)
    for index, optimizer in enumerate(context.optimizers):
        for attribute, part in (found for found in kept.values() if found[1].optimizer is optimizer):
            yield (
                f"self.{attribute}, a {type(part).__name__}, sets the learning rate of optimizer {index}, a "
                f"{type(optimizer).__name__}, and is not wrapped: the run does not step the scheduler, and no "
                "checkpoint contains it. Pass the scheduler through context.wrap_lr_scheduler() in __init__."
            )


def _find_inner(scheduler: Any) -> Iterator[LRScheduler]:
    """Yield the schedulers inside a scheduler, as in a ``SequentialLR``."""
    for value in getattr(scheduler, "__dict__", {}).values():
        for part in _list_parts(value):
            if isinstance(part, LRScheduler):
                yield part
                yield from _find_inner(part)
