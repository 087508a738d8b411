"""What killed runs have left in a storage is removed beside the next run, which does not wait for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.engine.checkpointing import clean
from tests.launching import environment
from tests.trials import fit_trial
from tests.warm_python import start_warm_python


def leave_incomplete(storage: Path) -> Path:
    """Make what a killed writer leaves: a directory without metadata, and its mark."""
    partial = storage / new_id()
    (partial / "code").mkdir(parents=True)
    (partial / "code" / "leftover.py").touch()
    mark = storage / ".det_lightning" / "staging" / f"{partial.name}.lock"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return partial


# Holds back each removal until the first batch is trained, and prints what it has seen.
HOLDS_REMOVALS = """
import os, sys, threading
from pathlib import Path

from det_lightning import pytorch
from det_lightning.checkpoint.storage.location import is_own_id
from tests.trials import SmallTrial

storage = Path(sys.argv[1])
# The run will write a checkpoint of its own.
leftovers = {name for name in os.listdir(storage) if is_own_id(name)}
training = threading.Event()
seen = []


def hold(event, arguments):
    if event == "os.remove" and str(arguments[0]).endswith("leftover.py"):
        seen.append((threading.current_thread().name, sorted(leftovers & {*os.listdir(storage)})))
        training.wait(20)


class Trial(SmallTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        training.set()
        return super().train_batch(batch, epoch_idx, batch_idx)


sys.addaudithook(hold)
with pytorch.init(enable_tensorboard_logging=False) as context:
    trainer = pytorch.Trainer(Trial(context), context, enable_progress_bar=False)
    trainer.fit(max_length=pytorch.Batch(1), checkpoint_policy="none", checkpoint_storage=storage)
for thread in threading.enumerate():
    if thread.name == "det_lightning-cleaning":
        thread.join()
print(seen)
"""


@pytest.mark.slow
def test_run_does_not_wait_for_cleaning(tmp_path: Path) -> None:
    for _ in range(3):
        leave_incomplete(tmp_path)
    command = [start_warm_python().executable, "-c", HOLDS_REMOVALS, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    # All are renamed before the first is removed.
    assert done.stdout == f"{[('det_lightning-cleaning', [])] * 3}\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == CheckpointStorage(tmp_path).list_ids()


def test_failed_cleaning_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".det_lightning").symlink_to(tmp_path)
    clean(CheckpointStorage(tmp_path))
    assert f"What killed runs left in {tmp_path} cannot be removed" in caplog.text


def test_default_storage_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = f"No storage of checkpoints is set: checkpoints go to {CheckpointStorage()}."
    for storage in (tmp_path, None):
        fit_trial(max_length=pytorch.Batch(1), checkpoint_policy="none", checkpoint_storage=storage)
        assert (said in caplog.messages) == (storage is None)
        assert len(CheckpointStorage(storage).list_ids()) == 1
