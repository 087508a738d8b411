"""A run of several processes on a remote storage, and another run that takes its trial."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from det_lightning import core, errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from tests.distributed.group_ranks import in_processes
from tests.trials import SmallTrial

pytestmark = pytest.mark.slow

STORAGE = "memory://lost-claims"


def be_suspended_while_another_run_takes_the_trial() -> None:
    root = CheckpointStorage(STORAGE).root
    (claim,) = [root / file for file in root.find_files() if "/runs/" in file]
    claim.write(json.dumps({**json.loads(claim.read()), "token": "another", "machine": "elsewhere"}).encode())
    now = time.time
    time.time = lambda: now() + 3600  # in this process, which ends soon


class SuspendedTrial(SmallTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 5 and self.context.distributed.rank == 0:
            be_suspended_while_another_run_takes_the_trial()
        return super().train_batch(batch, epoch_idx, batch_idx)


def train(distributed: core.DistributedContext) -> None:
    with pytorch.init(distributed=distributed, enable_tensorboard_logging=False) as context:
        pytorch.Trainer(SuspendedTrial(context), context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(24),
            reporting_period=pytorch.Batch(2),
            checkpoint_policy="none",
            checkpoint_storage=STORAGE,
        )


def test_lost_trial_ends_every_rank(tmp_path: Path) -> None:
    ends = in_processes(2, tmp_path, train)
    assert [type(end) for end in ends] == [errors.StorageError] * 2
    assert all("belongs to another run now" in str(end) for end in ends)
