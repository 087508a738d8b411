"""Makes the parts of a ``Trainer.fit``: the ``pl.Trainer``, its callbacks, and the checkpoint to resume from."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any

from det_lightning import errors
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.strategies.processes import TrainingProcesses
from det_lightning.arguments import require, wrong_argument
from det_lightning.callbacks.checkpoint import DeterminedCheckpoint
from det_lightning.callbacks.experiment import ExperimentReporter
from det_lightning.callbacks.preemption import PreemptionHandler
from det_lightning.callbacks.profiler import TorchProfiler
from det_lightning.callbacks.progress import TrialProgressBar
from det_lightning.callbacks.tensorboard import DeterminedTensorBoard
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.escaping import get_logger
from det_lightning.masking import mask_url
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import restarts

logger = get_logger(__name__)

# Flags of pl.Trainer that fit's own periods replace.
_PERIODS = {"check_val_every_n_epoch", "val_check_interval", "log_every_n_steps"}
# More damaged checkpoints in a row would be no accident.
_MOST_FALLBACKS = 10
# A run that deletes the newest checkpoint has written a newer checkpoint before.
_MOST_TRIES = 10


def require_parts(trial: Any, context: Any, arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError that names an argument of ``Trainer`` of the wrong kind."""
    call = "Trainer(trial, context)"
    if isinstance(trial, PyTorchTrialContext) and isinstance(context, PyTorchTrial):
        raise TypeError(f"{call} got the context first. Pass the trial first: Trainer(trial, context).")
    advice = "Build it with the context: Trainer(MyTrial(context), context)."
    require(isinstance(trial, PyTorchTrial), call, "a PyTorchTrial", trial, advice)
    advice = "Pass the context that the trial was built with, of `with init(...) as context`."
    require(isinstance(context, PyTorchTrialContext), call, "a PyTorchTrialContext", context, advice)
    for callback in list_callbacks(arguments):
        is_callback = hasattr(callback, "state_key") and not isinstance(callback, type)
        advice = "Callbacks of a trial are returned by its build_callbacks()."
        require(is_callback, "Trainer(callbacks=...)", "callbacks of Lightning", callback, advice)
        is_writer = isinstance(callback, DeterminedCheckpoint)
        advice = "Pass the callback that writes the checkpoints to fit(checkpoints=...)."
        require(not is_writer, "Trainer(callbacks=...)", "other callbacks", callback, advice)


def list_callbacks(arguments: Mapping[str, Any]) -> list[pl.Callback]:
    """Return the callbacks among the arguments of a ``pl.Trainer``, given as a list or a single callback."""
    given = arguments.get("callbacks") or []
    return list(given) if isinstance(given, list) else [given]


def choose_preemption(callbacks: list[pl.Callback]) -> PreemptionHandler:
    """Return the first handler of signals among the callbacks, or a new handler."""
    given = (callback for callback in callbacks if isinstance(callback, PreemptionHandler))
    return next(given, None) or PreemptionHandler()


def choose_callback(
    context: PyTorchTrialContext, given: DeterminedCheckpoint | None, names: Mapping[str, Any], **call: Any
) -> DeterminedCheckpoint:
    """Return the callback that writes the checkpoints: ``given``, or a new callback by the call and the configuration.

    The call, the configuration, and the ``names`` of the experiment and the job fill gaps of ``given``.
    """
    if given is None:
        given = DeterminedCheckpoint()
    else:
        require(isinstance(given, DeterminedCheckpoint), "fit(checkpoints=...)", "a DeterminedCheckpoint", given)
        given.require_agreement(**call)
    arguments = context.settings.configuration.complete(**call)
    given.fill_in(**{name.removeprefix("checkpoint_"): value for name, value in arguments.items()}, **names)
    return given


def make_lightning_trainer(
    context: PyTorchTrialContext,
    experiment: ExperimentReporter | None,
    arguments: Mapping[str, Any],
    checkpoint: DeterminedCheckpoint,
    preemption: PreemptionHandler,
) -> pl.Trainer:
    """Return the trainer of a run, with the ``arguments`` of ``Trainer``, callbacks, and defaults.

    Raise an ``UnsupportedTrainerFlags`` that names the arguments reserved to ``fit``.
    """
    given = dict(arguments)
    device = context.device
    decided = {
        "accelerator": device.type,
        "devices": [device.index or 0] if device.type == "cuda" else context.distributed.local_size,
        "num_nodes": context.distributed.cross_size,
        "strategy": TrainingProcesses(context.distributed, context.backend).make_strategy(),
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "inference_mode": False,
    }
    clashing = sorted((decided.keys() | _PERIODS) & given.keys())
    if clashing:
        raise errors.UnsupportedTrainerFlags(
            f"Trainer() got {', '.join(clashing)}, which fit() sets itself, as by max_length=, validation_period= and "
            "reporting_period=. To choose other values, use pl.Trainer with det_lightning.adapters.TrialModule."
        )
    callbacks: list[pl.Callback] = [checkpoint, DeterminedTensorBoard(context.tensorboard)]
    if experiment is not None:
        callbacks[:0] = experiment.callbacks(context.tensorboard)
        if "logger" not in given:
            given["logger"] = experiment.make_loggers()
    if context.profiler is not None:
        callbacks.append(TorchProfiler(context.profiler))
    given.pop("callbacks", None)
    callbacks += list_callbacks(arguments)
    if preemption not in callbacks:
        callbacks.append(preemption)
    has_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    # Somebody can see a bar move in a terminal, and in an interactive session such as a notebook.
    shows_bar = given.get("enable_progress_bar", has_bar or sys.stderr.isatty() or hasattr(sys, "ps1"))
    if shows_bar and not has_bar:
        callbacks.append(TrialProgressBar())
    saves = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    defaults = {"logger": False, "enable_checkpointing": saves, "enable_model_summary": False}
    defaults["enable_progress_bar"] = shows_bar
    return pl.Trainer(**{**defaults, **given, **decided}, callbacks=callbacks)


def choose_checkpoints(
    distributed: DistributedContext,
    checkpoints: DeterminedCheckpoint,
    latest: str | os.PathLike[str] | None,
) -> list[str]:
    """Return on every rank the checkpoint to resume from, now protected from other runs, and earlier checkpoints."""
    if not (latest is None or isinstance(latest, str | os.PathLike)):
        raise TypeError(wrong_argument("latest_checkpoint=", "the id, path or URL of a checkpoint, or 'last'", latest))
    found: list[str] = []
    if distributed.rank == 0:
        storage = checkpoints.storage
        most = _MOST_FALLBACKS if checkpoints.fall_back else 1
        find = functools.partial(_find_latest, storage, latest, checkpoints.job, most)
        for _ in range(_MOST_TRIES):
            found = storage.retry.call("looking for a checkpoint in", find, where=storage.root)
            # Another run may have found a newer checkpoint in the meantime, and be deleting this one.
            if not found or checkpoints.protect(found[0]):
                break
    chosen: list[str] = distributed.broadcast(found)
    return chosen


def _find_latest(
    storage: CheckpointStorage, latest: str | os.PathLike[str] | None, job: str | None, most: int
) -> list[str]:
    """Return the checkpoint to resume from; if the newest, followed by earlier ones, at most ``most`` in all."""
    if restarts():
        if job is None:
            logger.warning(
                "The script was restarted, but the job has no id to find checkpoints by. Start torchrun with "
                "--rdzv-id, or pass latest_checkpoint='last'."
            )
        elif newest := [*itertools.islice(storage.newest_first(job), most)]:
            shown = mask_url(newest[0])
            logger.warning("The script was restarted; the run resumes from its newest checkpoint, %s.", shown)
            return newest
    if latest is None:
        return []
    if latest == "last":
        return [*itertools.islice(storage.newest_first(), most)]
    try:
        return [storage.find(latest)]
    except errors.CheckpointNotFound as e:
        raise errors.CheckpointNotFound(
            f"latest_checkpoint={mask_url(os.fspath(latest))!r}: {e} latest_checkpoint='last' resumes from the newest."
        ) from e
