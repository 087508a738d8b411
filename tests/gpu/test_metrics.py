"""The metrics of a workload on a GPU come to the host together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from det_lightning.engine.metrics import MetricWindow
from tests.gpu.trials import OnGpu, train

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
