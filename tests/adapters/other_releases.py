"""Checkpoints that one release of torch and Lightning writes and another one goes on from.

python -m tests.adapters.other_releases write ARCHIVE
python -m tests.adapters.other_releases check ARCHIVE

An archive has a file of Lightning and a directory in Determined's format, both after 10 batches.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint
from tests.lightning import fit, lightning_version, trainer
from tests.trials import EPOCH_LEN, SmallTrial, weights_of

SAVED_AFTER = 10
NAMES = ("lightning.ckpt", "determined")


class WithoutDropout(SmallTrial):
    """Draws nothing from torch's generator: from the same state releases of torch draw different masks of dropout."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        dropout: Any = self.context.models[0][1]  # type: ignore[index]
        dropout.p = 0.0


def write(archive: Path) -> None:
    """Train, and write an archive with both checkpoints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "code").mkdir()
        saved = DeterminedCheckpoint(
            folder / "storage", policy="none", period=pytorch.Batch(SAVED_AFTER), code_dir=folder / "code"
        )
        module = TrialModule(WithoutDropout, {"learning_rate": 0.1})
        lightning = fit(module, max_steps=2 * SAVED_AFTER, callbacks=[saved])
        lightning.save_checkpoint(folder / NAMES[0])
        Path(str(saved.last_checkpoint_path)).rename(folder / NAMES[1])
        with tarfile.open(archive, "w:gz") as packed:
            for path in NAMES:
                packed.add(folder / path, path)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack what :func:`write` has packed."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder)


def difference(checkpoint: Path) -> float:
    """Return how far the weights of a run that goes on from a checkpoint are from those of one that was not stopped."""
    resumed, straight = TrialModule(WithoutDropout), TrialModule(WithoutDropout)
    trainer(max_epochs=2).fit(resumed, ckpt_path=checkpoint)
    assert resumed.trial_run.state.batches_trained == 2 * EPOCH_LEN
    fit(straight, max_epochs=2)
    return float((weights_of(resumed.trial) - weights_of(straight.trial)).abs().max())


def check(archive: Path) -> None:
    """Print how far runs that go on from an archive end from those that were never stopped."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(archive, Path(folder))
        for name in NAMES:
            print(f"{name}: {difference(Path(folder) / name):.1e} with torch {torch.__version__}, {lightning_version}")


if __name__ == "__main__":
    _, command, given = sys.argv
    {"write": write, "check": check}[command](Path(given))
