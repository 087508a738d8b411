"""Batches that workers load are copied to the GPU beside its work: with the same numbers, and nothing waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from det_lightning import pytorch
from tests.gpu.trials import BATCH_SIZE, OnGpu, curve, train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


class FromWorkers(OnGpu):
    """Workers load the data, of which three passes and a part of a fourth are trained."""

    prefetch = True
    samples = 16 * BATCH_SIZE

    def make_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.make_data(), BATCH_SIZE, shuffle=True, num_workers=2, prefetch=self.prefetch)


class InTurn(FromWorkers):
    prefetch = False


def test_losses_are_the_same_and_no_batch_waits(tmp_path: Path) -> None:
    aside, in_turn = (curve(train(kind, tmp_path / kind.__name__)) for kind in (FromWorkers, InTurn))
    assert torch.equal(aside, in_turn)
