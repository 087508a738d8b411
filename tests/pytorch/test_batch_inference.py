"""``torch_batch_process`` in one process. tests/conformance compares it with the real one; two: tests/experiments."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torchmetrics
from fsspec.implementations.memory import MemoryFileSystem

from det_lightning import core, errors
from det_lightning.pytorch.experimental import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process

NUMBERS: Any = torch.arange(5.0)


class Noting(TorchBatchProcessor):
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context
        self.seen: list[int] = []

    def process_batch(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen.append(batch_idx)

    def on_checkpoint_start(self) -> None:
        with self.context.upload_path() as path:
            (path / f"after-{self.seen[-1]}.json").write_text(json.dumps(self.seen))


def test_remote_storage_gets_checkpoints_and_output() -> None:
    torch_batch_process(Noting, NUMBERS, checkpoint_interval=3, checkpoint_storage="memory://batches")
    files = fsspec.filesystem("memory").find("/batches")
    MemoryFileSystem.store.clear()
    names = sorted(name.split("/", 3)[3] for name in files if ".det" not in name)
    kept = ["rank_0/after-2.json", "rank_0/after-4.json"]
    assert names == ["batch_completed.json"] * 2 + ["metadata.json"] * 2 + kept


def test_a_failed_block_uploads_nothing() -> None:
    class Failing(Noting):
        def on_checkpoint_start(self) -> None:
            with self.context.upload_path() as path:
                (path / "half").touch()
                raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        torch_batch_process(Failing, NUMBERS, checkpoint_storage="memory://batches")
    assert fsspec.filesystem("memory").find("/batches") == []


def test_resume_with_other_batches_is_refused() -> None:
    torch_batch_process(Noting, NUMBERS, max_batches=2, checkpoint_storage="storage")
    (checkpoint,) = Path("storage").resolve().glob("*/metadata.json")
    with pytest.raises(ValueError, match="batch_size times the number of ranks must be 1, as before; got 2"):
        torch_batch_process(Noting, NUMBERS, 2, checkpoint_storage="storage", latest_checkpoint=str(checkpoint.parent))
    assert len([path for path in Path("storage").glob("*/") if not (path / "metadata.json").exists()]) == 1


def test_other_checkpoints_are_refused() -> None:
    storing = {"steps_completed": 3}
    with core.init(checkpoint_storage="storage") as context, context.checkpoint.store_path(storing) as (_, storage_id):
        pass
    with pytest.raises(errors.InvalidCheckpointException, match="the metadata lack default_output_uuid"):
        torch_batch_process(Noting, NUMBERS, checkpoint_storage="storage", latest_checkpoint=storage_id)


def test_reduced_metrics_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Measuring(Noting):
        def __init__(self, context: TorchBatchProcessorContext) -> None:
            super().__init__(context)
            self.sum = context.wrap_reducer(sum, name="sum")
            self.mean = context.wrap_reducer(torchmetrics.MeanMetric(), name="mean")

        def process_batch(self, batch: torch.Tensor, batch_idx: int) -> None:
            super().process_batch(batch, batch_idx)
            self.sum.update(float(batch.sum()))
            self.mean.update(batch)

    with caplog.at_level(logging.INFO, logger="det_lightning"):
        torch_batch_process(Measuring, NUMBERS, batch_size=2, checkpoint_storage="storage")
    assert "Validation metrics after 3 batches: {'sum': 10.0, 'mean': tensor(2.)}" in caplog.messages


def test_context_prepares_the_model_and_reports(caplog: pytest.LogCaptureFixture) -> None:
    class Using(Noting):
        def __init__(self, context: TorchBatchProcessorContext) -> None:
            super().__init__(context)
            self.model = context.prepare_model_for_inference(torch.nn.Dropout())
            assert not self.model.training
            assert context.to_device({"x": [torch.zeros(1)]})["x"][0].device == context.device
            assert (context.get_distributed_rank(), context.get_distributed_size()) == (0, 1)
            assert context.distributed.get_rank() == 0
            context.report_task_using_checkpoint("a1")
            context.report_task_using_model_version("b2")
            context.report_metrics("inference", 1, {"batches": 1})
            assert context.get_tensorboard_path().parent == Path("runs")
            with pytest.raises(ValueError, match=r"There are no hyperparameters without.*det-lightning run CONFIG"):
                context.get_hparams()

    with caplog.at_level(logging.INFO, logger="det_lightning"):
        torch_batch_process(Using, NUMBERS, checkpoint_storage="storage")
    assert "This task uses the checkpoint a1." in caplog.messages
    assert "This task uses the model version b2." in caplog.messages
    assert "Metrics inference after 1 batches: {'batches': 1}" in caplog.messages


def test_unusable_arguments_are_named_together() -> None:
    arguments: dict[str, Any] = {"shuffle": True, "batch_sampler": None, "sampler": None, "batch_size": 2}
    given = dict(arguments)
    with pytest.raises(ValueError, match="torch_batch_process") as raised:
        torch_batch_process(Noting, NUMBERS, batch_size=0, checkpoint_interval=-1, dataloader_kwargs=given)
    said = ["sampler, and", "batch_sampler, and", "shuffle=True", "batch_size is passed twice", "1; got 0", "1; got -1"]
    assert [part for part in said if part not in str(raised.value)] == []
    assert given == arguments


def test_a_dataset_needs_a_length() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    with pytest.raises(TypeError, match=r"Endless has no __len__\(\)"):
        torch_batch_process(Noting, Endless())
