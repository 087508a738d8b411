"""A script for batch inference as on a cluster: squares numbers; the first run waits for SIGTERM."""

import importlib
import json
import signal
import sys
import time
from typing import Any

import torch

det: Any = importlib.import_module("determined" if "--theirs" in sys.argv else "det_lightning")
experimental: Any = importlib.import_module(f"{det.__name__}.pytorch.experimental")

RECORDS = 11
signals: list[int] = []


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Squares(experimental.TorchBatchProcessor):
    def __init__(self, context: Any) -> None:
        self.context = context
        self.waits = (info := det.get_cluster_info()) is not None and info.latest_checkpoint is None
        self.squares: list[float] = []
        self.total = context.wrap_reducer(sum, name="total")

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        self.squares += (self.context.to_device(batch) ** 2).tolist()
        self.total.update(float(batch.sum()))
        while self.waits and batch_idx == 3 and not signals:
            time.sleep(0.02)

    def on_checkpoint_start(self) -> None:
        with self.context.upload_path() as path:
            (path / f"{len(list(path.iterdir()))}.json").write_text(json.dumps(self.squares))
        self.squares = []

    def on_finish(self) -> None:
        if self.context.get_distributed_rank() == 0:
            self.context.report_metrics("inference", RECORDS, {"finished": 1})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    experimental.torch_batch_process(Squares, Numbers(), batch_size=1, checkpoint_interval=2)
