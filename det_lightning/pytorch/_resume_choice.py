"""Choosing the checkpoint that a ``Trainer.fit`` resumes from."""

from __future__ import annotations

import itertools
import logging
import os

from det_lightning.callbacks.checkpoint import DeterminedCheckpoint
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.core._distributed import DistributedContext
from det_lightning.core._topology import restarts
from det_lightning.escaping import escape
from det_lightning.masking import mask_url

logger = logging.getLogger(__name__)

# More damaged checkpoints in a row would be no accident.
_MOST_FALLBACKS = 10
# Each time another run deletes the newest checkpoint, it has written a newer one.
_MOST_TRIES = 10


def choose_checkpoints(
    distributed: DistributedContext,
    checkpoints: DeterminedCheckpoint,
    latest: str | os.PathLike[str] | None,
    job: str | None,
    fall_back: bool,
) -> list[str]:
    """Return on every rank the checkpoint to resume from, now protected from other runs, and those before it."""
    found: list[str] = []
    if distributed.rank == 0:
        for _ in range(_MOST_TRIES):
            found = _find_latest(checkpoints.storage, latest, job, most=_MOST_FALLBACKS if fall_back else 1)
            # Another run may have found a newer one in the meantime, and be deleting this one.
            if not found or checkpoints.protect(found[0]):
                break
    chosen: list[str] = distributed.broadcast(found)
    return chosen


def _find_latest(
    storage: CheckpointStorage, latest: str | os.PathLike[str] | None, job: str | None, most: int
) -> list[str]:
    """Return the checkpoint to resume from and, if that is the newest, those before it, at most ``most`` in all."""
    if restarts():
        if job is None:
            logger.warning(
                "The script was restarted, but its job has no id, so its checkpoints are not known from others. Give "
                "torchrun an --rdzv-id, or pass latest_checkpoint='last'."
            )
        elif newest := [*itertools.islice(storage.newest_first(job), most)]:
            shown = escape(mask_url(newest[0]))
            logger.warning("The script was restarted; the run resumes from its newest checkpoint, %s.", shown)
            return newest
    if latest is None:
        return []
    return [*itertools.islice(storage.newest_first(), most)] if latest == "last" else [storage.find(latest)]
