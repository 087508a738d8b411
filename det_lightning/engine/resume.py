"""Resuming from a checkpoint: checking the content, and loading the content into a trial."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint import safe_load
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import RESUME_FILE, modernize
from det_lightning.checkpoint.format.resume_state import read_settings
from det_lightning.engine.train_and_evaluate import TrialEvents
from det_lightning.escaping import get_logger
from det_lightning.pytorch._position import GlobalBatch
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._random_state import require_rng, restore_rng
from det_lightning.pytorch._weights import load_resume_state, load_state
from det_lightning.ranks.distributed_context import DistributedContext

logger = get_logger(__name__)


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
    content: CheckpointContent | None, rank: int, ranks: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return how a rank's passes over the training data began, and the positions of the loaders; empty if unknown.

    If another number of ranks wrote the checkpoint, all ranks get those of the chief, and so share one order.
    """
    if content is None or content.resume is None:
        return [], {}
    resume = content.resume
    writer = rank if resume.world_size == ranks else 0
    return list(resume.journals[writer]), resume.positions[writer] if resume.positions else {}


def adapt_data_state(state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """Return a state of the training data for ``now`` ranks; ``before`` ranks wrote it.

    From the start of an epoch the data begin afresh; in the middle raise a CheckpointError.
    """
    if before == now:
        return state
    if not state["epoch_start"]:
        raise errors.CheckpointError(
            f"The checkpoint holds the state of the training data of {before} process(es) in the middle of an epoch, "
            f"which cannot be divided among {now} process(es). Resume with {before}, or from a checkpoint at the end "
            "of an epoch."
        )
    return {**state, "states": [], "behind": 0}


def continue_batches(
    content: CheckpointContent, batch_sampler: Any, now: GlobalBatch, *, warns: bool
) -> tuple[GlobalBatch, bool]:
    """Return the global batch to continue with, and whether the recorded order of the samples still applies.

    A position counts global batches. If their size is another one now, the position becomes the same number of samples.
    Otherwise the position stays, and the former global batches are dealt to the ranks, if possible.
    """
    before = _read_global_batch(content, now)
    kept, follows_order = now, before.batch_size == now.batch_size
    notice: str | None = None
    if not content.trial_state.batches_trained or (before.ranks == now.ranks and before.equals(now)):
        return kept, follows_order
    if not before.equals(now):
        notice = _convert_position(content, before, now)
    elif obstacle := before.find_obstacle(batch_sampler, now):
        follows_order = False
        notice = f"{obstacle}. The position stays, but samples of the current pass may be repeated or left out"
    else:
        kept, follows_order = before, True
        notice = before.describe_partial(now.ranks)
    if notice and warns:
        logger.warning(
            "The run resumes on %d process(es) after %d batches; earlier batches were divided among %d: %s.",
            *(now.ranks, content.trial_state.batches_trained, before.ranks, notice),
        )
    return kept, follows_order


def warn_of_own_data(content: CheckpointContent | None, loader: Any, ranks: int) -> None:
    """Warn if other ranks than before continue with data that the trial divides among ranks itself."""
    if content is not None and content.resume is not None and content.resume.world_size != ranks:
        logger.warning(
            "The run resumes on %d process(es) after %d batches of %d: the trial divides its data, a %s, itself, and "
            "must continue after as many batches of all processes.",
            *(ranks, content.trial_state.batches_trained, content.resume.world_size, type(loader).__name__),
        )


def _read_global_batch(content: CheckpointContent, now: GlobalBatch) -> GlobalBatch:
    """Return the global batch of the checkpoint; for old ones from the hyperparameters, if the loader follows them."""
    resume = content.resume
    if resume is not None and resume.global_batch:
        return GlobalBatch(**resume.global_batch)
    ranks = now.ranks if resume is None else resume.world_size  # Determined does not write the number
    size = (read_settings(resume, content.load_data)["hparams"] or {}).get("global_batch_size")
    if type(size) is not int or size < ranks:
        return GlobalBatch(ranks, now.batch_size if ranks == now.ranks else None, None, now.global_batch_size)
    share = size // ranks if now.follows_hyperparameter() else now.batch_size
    return GlobalBatch(ranks, share, now.samples_per_epoch, size)


def _convert_position(content: CheckpointContent, before: GlobalBatch, now: GlobalBatch) -> str:
    """Convert the counts of batches to batches of the present size; return what was done."""
    if not before.can_convert(now):
        return "the sizes of the batches are unknown, and the position stays"
    state = content.trial_state
    for name in ("batches_trained", "last_ckpt", "last_val"):
        setattr(state, name, before.convert(getattr(state, name), now))
    content.epochs_known = False
    return (
        f"a batch of all processes had {before.count_samples()} samples and has {now.count_samples()}, and the "
        "position is the same number of samples"
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
