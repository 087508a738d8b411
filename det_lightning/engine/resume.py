"""Going on from a checkpoint: checking its content, and loading it into a trial."""

from __future__ import annotations

import logging
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import RESUME_FILE
from det_lightning.checkpoint.format.resume_state import ResumeState
from det_lightning.checkpoint.format.upgrade import modernize
from det_lightning.core._distributed import DistributedContext
from det_lightning.engine.events import TrialEvents
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import require_rng, restore_rng
from det_lightning.pytorch._weights import (
    average_gradients,
    explaining,
    load_gradients,
    load_rest,
    load_schedulers,
    load_state,
)

logger = logging.getLogger(__name__)


def _of_rank(entries: list[Any], rank: int) -> Any:
    """Return the entry of a rank; where there were fewer ranks, of one of those."""
    return entries[rank % len(entries)]


def require_resumable(content: CheckpointContent) -> None:
    """Raise unless a run can go on from a checkpoint; where it has a state for an exact resume, exactly.

    Raises:
        CheckpointError: values are missing or wrong; names them.
    """
    resume = content.resume
    if resume is None:
        return
    source = content.source if content.directory is None else str(content.directory / RESUME_FILE)
    resume.require_journals(source)
    batches = resume.trial_state.get("batches_trained")
    if batches != content.trial_state.batches_trained:
        raise errors.InvalidCheckpointException(
            f"{source} belongs to another checkpoint: that one was written after {batches} batches, this one after "
            f"{content.trial_state.batches_trained}."
        )
    for rank, state in enumerate(resume.rng_states):
        require_rng(state, f"{source}, of rank {rank}")
    for journal in resume.journals:
        for start in journal:
            require_rng(start["rng"], f"{source}, of the pass at batch {start['first_batch']}")


def journal_of(content: CheckpointContent | None, rank: int) -> list[dict[str, Any]] | None:
    """Return how the passes over the training data of a rank began; None if that is not known."""
    if content is None or content.resume is None:
        return None
    return list(_of_rank(content.resume.journals, rank))


def adapt_to(content: CheckpointContent, size: int) -> None:
    """Convert the position, counted in batches of each rank, for another number of ranks.

    As many samples count as seen as were, if the batches stay of the same size; rounded up to whole batches of all
    ranks, so the position is approximate.
    """
    before = 1 if content.resume is None else content.resume.world_size
    if before == size:
        return
    state = content.trial_state
    for name in ("batches_trained", "last_ckpt", "last_val"):
        setattr(state, name, -(-getattr(state, name) * before // size))
    content.epochs_known = False
    logger.warning(
        "The checkpoint was written by %d process(es) and is read by %d: the run goes on after %d batches of each, "
        "which is approximately as many samples.",
        before,
        size,
        state.batches_trained,
    )


def apply(content: CheckpointContent, context: PyTorchTrialContext, events: TrialEvents) -> None:
    """Load everything into the trial.

    Raises:
        InvalidCheckpointException: something does not fit; names what.
    """
    state = content.state
    resume = content.resume
    source = content.source
    if resume is None and "rng_state" in state:
        require_rng(state["rng_state"], source)
    events.emit("on_checkpoint_load_start", state)
    if content.has_weights:
        modernize(state, source)
        load_state(context, events.callbacks, state, source, content.trial_class)
    else:
        load_schedulers(context, state, source)
        load_rest(context, events.callbacks, state)
    if resume is not None:
        _apply_resume_state(resume, context, source)
    elif "rng_state" in state:
        restore_rng(state["rng_state"], context.device)
    # The state may be large, and everything in it has its place now.
    content.state = {}


def _apply_resume_state(resume: ResumeState, context: PyTorchTrialContext, source: str) -> None:
    context.optimizer_steps = resume.optimizer_steps
    rank = context.distributed.rank
    gradients = [resume.gradients] if resume.world_size == 1 else resume.gradients
    sharded = context.backend.states.is_sharded
    with explaining(f"The gradients in {source}"):
        load_gradients(context, average_gradients(gradients) if sharded else _of_rank(gradients, rank))
        context.precision.load_unfinished(resume.precision)
    restore_rng(_of_rank(resume.rng_states, rank), context.device)


def require_same_checkpoint(distributed: DistributedContext, content: CheckpointContent | None) -> None:
    """Raise if the ranks go on from different checkpoints; all ranks have to call it.

    Raises:
        CheckpointError: they do; says who takes which.
    """
    own = None if content is None else content.name
    found = distributed.allgather(own)
    if any(name != own for name in found):
        choices = ", ".join(f"rank {rank} from {name or 'none'}" for rank, name in enumerate(found))
        raise errors.CheckpointError(
            f"The ranks go on from different checkpoints: {choices}. Do all see the same storage? Let one process "
            "choose the checkpoint, before the others look for it."
        )
