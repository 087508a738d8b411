"""Going on from a checkpoint: what it holds for an exact resume, and putting it into a trial."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.layout import RESUME_FILE
from det_lightning.checkpoint.format.resume_values import require_resume, require_resume_complete
from det_lightning.checkpoint.format.trial_state import TrialState
from det_lightning.checkpoint.format.upgrade import modernize
from det_lightning.checkpoint.safe_load.reading import CheckpointContent
from det_lightning.core._distributed import DistributedContext
from det_lightning.engine.events import TrialEvents
from det_lightning.masking import describe_masked, mask
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import require_rng, restore_rng
from det_lightning.pytorch._weights import (
    average_gradients,
    collect_gradients,
    explaining,
    load_gradients,
    load_rest,
    load_schedulers,
    load_state,
)

__all__ = ["ResumePoint", "load_data_of", "require_same_checkpoint", "resume_payload", "run_settings"]

logger = logging.getLogger("det_lightning.checkpoint")


def run_settings(context: PyTorchTrialContext) -> dict[str, Any]:
    """Return hyperparameters and experiment configuration to be written; None for what the trial does not have.

    Their secrets are masked.
    """

    def value_or_none(lookup: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return lookup()
        except ValueError:
            return None

    return {
        "hparams": mask(value_or_none(context.get_hparams)),
        "experiment_config": mask(value_or_none(context.get_experiment_config)),
    }


def load_data_of(context: PyTorchTrialContext, trial: Any) -> dict[str, Any]:
    """Return the content of ``load_data.json``: how to build ``trial`` again."""
    settings = run_settings(context)
    complete = None not in settings.values()
    return {
        "trial_type": "PyTorchTrial",
        "experiment_config": settings["experiment_config"] if complete else None,
        "hparams": settings["hparams"] if complete else None,
        "trial_cls_spec": f"{type(trial).__module__}:{type(trial).__qualname__}",
        "is_trainer": True,
    }


def resume_payload(
    context: PyTorchTrialContext, state: TrialState, rng_state: dict[str, Any], journal: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the content of ``resume.pth``, and of the entry that a Lightning checkpoint gets."""
    return {
        "trial_state": dict(vars(state)),
        "rng_states": context.distributed.allgather(rng_state),
        "journals": context.distributed.allgather(journal),
        "optimizer_steps": context.optimizer_steps,
        "gradients": _gradients_of_ranks(context),
        "precision": context.precision.unfinished(),
        "world_size": context.distributed.size,
        "settings": json.dumps(run_settings(context), default=describe_masked),
    }


def _gradients_of_ranks(context: PyTorchTrialContext) -> Any:
    """Return the gradients of an aggregation under way: of a single rank as they are, of several a list of them.

    Where they are sharded the list has their average only, on the chief.
    """
    own = collect_gradients(context)
    if context.distributed.size == 1:
        return own
    return [own] if context.backend.states.is_sharded else context.distributed.allgather(own)


def _of_rank(entries: list[Any], rank: int) -> Any:
    """Return the entry of a rank; where there were fewer ranks, of one of those."""
    return entries[rank % len(entries)]


@dataclasses.dataclass
class ResumePoint:
    """A checkpoint to go on from, either Determined's directory or a file of Lightning's.

    Attributes:
        name: id of the checkpoint, for the callbacks.
        source: path or URL of where it was read.
        state: models, optimizers, schedulers, callbacks, random state, as in ``state_dict.pth``; for a file of
            Lightning's, which loads them itself, without models and optimizers.
        trial_state: how far the trial had come.
        extra: what :func:`resume_payload` returned; None if Determined wrote the checkpoint.
        has_weights: ``state`` holds models and optimizers.
        epochs_known: ``trial_state`` tells the number of epochs; old releases did not write it.
        trial_class: the class that wrote it, as ``"module:QualName"``, if that is known.
    """

    name: str
    source: str
    state: dict[str, Any]
    trial_state: TrialState
    extra: dict[str, Any] | None
    has_weights: bool = True
    epochs_known: bool = True
    trial_class: str | None = None

    @classmethod
    def from_checkpoint(cls, content: CheckpointContent) -> ResumePoint:
        """Take a checkpoint in Determined's format.

        Raises:
            CheckpointError: values are missing or wrong; names them.
        """
        if content.resume is not None:
            _require_exact(content.resume, str(content.directory / RESUME_FILE), content.trial_state)
        return cls(
            content.name,
            content.source,
            content.state,
            content.trial_state,
            content.resume,
            epochs_known=content.epochs_known,
            trial_class=content.trial_class,
        )

    @classmethod
    def from_lightning(cls, entry: dict[str, Any]) -> ResumePoint:
        """Take the entry that a :class:`TrialModule` added to a checkpoint of Lightning's.

        Raises:
            CheckpointError: values are missing or wrong; names them.
        """
        source = "the Lightning checkpoint"
        parts = {name: entry.get(name) for name in ("extra", "state")} if isinstance(entry, dict) else {"entry": entry}
        wrong = [f"{name!r} is a {type(part).__name__}" for name, part in parts.items() if not isinstance(part, dict)]
        if wrong or "trial_state" not in entry["extra"]:
            what = "; ".join(wrong) or "it lacks 'trial_state'"
            raise errors.InvalidCheckpointException(f"What a TrialModule added to {source} is damaged: {what}.")
        # One that Determined wrote, and `det-lightning checkpoint export` converted, knows only that.
        extra = entry["extra"] if entry["extra"].keys() != {"trial_state"} else None
        require_resume(entry["extra"], source)
        trial_state = TrialState(**entry["extra"]["trial_state"])
        if extra is not None:
            _require_exact(extra, source, trial_state)
        load_data = entry.get("load_data")
        return cls(
            entry.get("name", ""),
            source,
            entry["state"],
            trial_state,
            extra,
            has_weights=False,
            epochs_known=entry.get("epochs_known", True),
            trial_class=load_data.get("trial_cls_spec") if isinstance(load_data, dict) else None,
        )

    def journal(self, rank: int) -> list[dict[str, Any]] | None:
        """Return how the passes over the training data of a rank began."""
        return None if self.extra is None else list(_of_rank(self.extra["journals"], rank))

    def adapt_to(self, size: int) -> None:
        """Convert the position, counted in batches of each rank, for another number of ranks.

        As many samples count as seen as were, if the batches stay of the same size; rounded up to whole batches of all
        ranks, so the position is approximate.
        """
        before = 1 if self.extra is None else self.extra.get("world_size", 1)
        if before == size:
            return
        state = self.trial_state
        for name in ("batches_trained", "last_ckpt", "last_val"):
            setattr(state, name, -(-getattr(state, name) * before // size))
        self.epochs_known = False
        logger.warning(
            "The checkpoint was written by %d process(es) and is read by %d: the run goes on after %d batches of each, "
            "which is approximately as many samples.",
            before,
            size,
            state.batches_trained,
        )

    def apply(self, context: PyTorchTrialContext, events: TrialEvents) -> None:
        """Load everything into the trial.

        Raises:
            InvalidCheckpointException: something does not fit; names what.
        """
        if self.extra is None and "rng_state" in self.state:
            require_rng(self.state["rng_state"], self.source)
        events.emit("on_checkpoint_load_start", self.state)
        if self.has_weights:
            modernize(self.state, self.source)
            load_state(context, events.callbacks, self.state, self.source, self.trial_class)
        else:
            load_schedulers(context, self.state, self.source)
            load_rest(context, events.callbacks, self.state)
        if self.extra is not None:
            context.optimizer_steps = self.extra["optimizer_steps"]
            rank, saved = context.distributed.rank, self.extra["gradients"]
            gradients = [saved] if self.extra.get("world_size", 1) == 1 else saved
            sharded = context.backend.states.is_sharded
            with explaining(f"The gradients in {self.source}"):
                load_gradients(context, average_gradients(gradients) if sharded else _of_rank(gradients, rank))
                context.precision.load_unfinished(self.extra.get("precision", {}))
            restore_rng(_of_rank(self.extra["rng_states"], rank), context.device)
        elif "rng_state" in self.state:
            restore_rng(self.state["rng_state"], context.device)
        # The state may be large, and everything in it has its place now.
        self.state = {}


def _require_exact(resume: dict[str, Any], source: str, trial_state: TrialState) -> None:
    """Raise unless an exact resume finds all that it needs, and it belongs to ``trial_state``."""
    require_resume_complete(resume, source)
    batches = resume["trial_state"].get("batches_trained")
    if batches != trial_state.batches_trained:
        raise errors.InvalidCheckpointException(
            f"{source} belongs to another checkpoint: that one was written after {batches} batches, this one after "
            f"{trial_state.batches_trained}."
        )
    for rank, state in enumerate(resume["rng_states"]):
        require_rng(state, f"{source}, of rank {rank}")
    for journal in resume["journals"]:
        for start in journal:
            require_rng(start["rng"], f"{source}, of the pass at batch {start['first_batch']}")


def require_same_checkpoint(distributed: DistributedContext, resume: ResumePoint | None) -> None:
    """Raise if the ranks go on from different checkpoints; all ranks have to call it.

    Raises:
        CheckpointError: they do; says who takes which.
    """
    own = None if resume is None else resume.name
    found = distributed.allgather(own)
    if any(name != own for name in found):
        choices = ", ".join(f"rank {rank} from {name or 'none'}" for rank, name in enumerate(found))
        raise errors.CheckpointError(
            f"The ranks go on from different checkpoints: {choices}. Do all see the same storage? Let one process "
            "choose the checkpoint, before the others look for it."
        )
