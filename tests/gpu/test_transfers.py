"""Metrics come from a GPU together, batches of workers go there beside its work, and no batch waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from det_lightning import pytorch
from det_lightning.engine.metrics import MetricWindow
from tests.gpu.trials import BATCH_SIZE, OnGpu, curve, train

pytestmark = pytest.mark.gpu


def test_metrics_of_each_type_and_shape_take_one_transfer() -> None:
    window = MetricWindow()
    for number in range(100):
        value = torch.tensor(float(number), device="cuda")
        window.add({"loss": value, "half": value.half(), "count": value.long(), "vector": value.expand(3)})
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        batches = window.close()
    transfers = [event for event in profiled.events() or [] if "Memcpy DtoH" in event.name]
    assert len(transfers) == 4
    assert [float(batch["loss"]) for batch in batches] == [float(number) for number in range(100)]
    assert batches[7]["vector"].tolist() == [7.0] * 3


class Reporting(OnGpu):
    """Reports after every fifth batch."""

    warm_up = 12
    period = 5


@pytest.mark.slow
def test_no_batch_waits_for_metrics(tmp_path: Path) -> None:
    train(Reporting, tmp_path)


# Batches that workers load are copied beside its work


class FromWorkers(OnGpu):
    """Workers load the data, of which three passes and a part of a fourth are trained."""

    prefetch = True
    samples = 16 * BATCH_SIZE

    def make_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.make_data(), BATCH_SIZE, shuffle=True, num_workers=2, prefetch=self.prefetch)


class InTurn(FromWorkers):
    prefetch = False


@pytest.mark.slow
def test_losses_are_the_same_and_no_batch_waits(tmp_path: Path) -> None:
    aside, in_turn = (curve(train(kind, tmp_path / kind.__name__)) for kind in (FromWorkers, InTurn))
    assert torch.equal(aside, in_turn)
