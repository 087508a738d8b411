"""Resuming from a checkpoint: checking the content, and loading the content into a trial."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import RESUME_FILE, modernize
from det_lightning.engine.events import TrialEvents
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import require_rng, restore_rng
from det_lightning.pytorch._weights import load_resume_state, load_state, of_rank
from det_lightning.ranks.distributed_context import DistributedContext

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StateBeforeValidation:
    """The random state, the loaders' positions, and ``has_validated`` before a validation that a longer run would not
    make.
    """

    rng: dict[str, Any]
    positions: dict[str, Any]
    has_validated: bool


def require_resumable(content: CheckpointContent) -> None:
    """Raise a CheckpointError naming missing or wrong values if a run cannot resume from the checkpoint."""
    resume = content.resume
    if resume is None:
        return
    source = content.source if content.directory is None else str(content.directory / RESUME_FILE)
    resume.require_journals(source)
    batches = resume.trial_state.get("batches_trained")
    if batches != content.trial_state.batches_trained:
        raise errors.InvalidCheckpointException(
            f"{source} belongs to another checkpoint, written after {batches} batches; this checkpoint was written "
            f"after {content.trial_state.batches_trained}."
        )
    for rank, state in enumerate(resume.rng_states):
        require_rng(state, f"{source}, of rank {rank}")
    for start in itertools.chain.from_iterable(resume.journals):
        require_rng(start["rng"], f"{source}, of the pass at batch {start['first_batch']}")


def read_journal(
    content: CheckpointContent | None, rank: int
) -> tuple[list[dict[str, Any]] | None, dict[str, Any] | None]:
    """Return how a rank's passes over the training data began, and the positions of the loaders; None if unknown."""
    if content is None or content.resume is None:
        return None, None
    resume = content.resume
    return list(of_rank(resume.journals, rank)), of_rank(resume.positions, rank) if resume.positions else None


def adapt_position(content: CheckpointContent, size: int) -> None:
    """Convert the position, counted in batches per rank, to another number of ranks.

    If the batch size stays the same, so does the number of samples seen, rounded up to whole batches of all ranks.
    """
    before = 1 if content.resume is None else content.resume.world_size
    state = content.trial_state
    if before == size or state.batches_trained == 0:
        return
    for name in ("batches_trained", "last_ckpt", "last_val"):
        setattr(state, name, -(-getattr(state, name) * before // size))
    content.epochs_known = False
    logger.warning(
        "The checkpoint was written by %d process(es) and is read by %d: the run resumes after %d batches of each "
        "process, approximately as many samples.",
        before,
        size,
        state.batches_trained,
    )


def apply(content: CheckpointContent, context: PyTorchTrialContext, events: TrialEvents) -> None:
    """Load everything into the trial; raise an InvalidCheckpointException naming values that do not fit."""
    loaded = content
    if content.is_sharded and not context.backend.states.is_sharded:
        loaded = safe_load.read_all_parts(content)
    state = loaded.state
    resume = loaded.resume
    source = content.source
    if resume is None and "rng_state" in state:
        require_rng(state["rng_state"], source)
    events.emit("on_checkpoint_load_start", state)
    if content.has_weights:
        modernize(state, source)
    load_state(context, events.callbacks, state, source, content.trial_class, with_weights=content.has_weights)
    if resume is not None:
        load_resume_state(context, resume, source)
    elif "rng_state" in state:
        restore_rng(state["rng_state"], context.device)
    # The state may be large, and is no longer needed.
    content.state = {}
    if content.is_sharded and content.kept is not None:
        content.kept.close()


def require_same_checkpoint(distributed: DistributedContext, content: CheckpointContent | None) -> None:
    """Raise a CheckpointError if the ranks resume from different checkpoints; all ranks must call this."""
    own = None if content is None else content.name
    found = distributed.allgather(own)
    if any(name != own for name in found):
        choices = ", ".join(f"rank {rank} from {name or 'none'}" for rank, name in enumerate(found))
        raise errors.CheckpointError(
            f"The ranks resume from different checkpoints: {choices}. All ranks must see the same storage. Let one "
            "rank choose the checkpoint before the other ranks look for checkpoints."
        )
