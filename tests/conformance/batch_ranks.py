"""One rank of batch inferences on one of the two sides, which writes what happened to files.

torchrun --nproc-per-node 2 -m tests.conformance.batch_ranks SIDE CASES OUTPUT_DIR
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.conformance.ranks import connect

Events = list[Any]


def recording_processor(api: Any, events: Events) -> type:
    """Return a processor that writes down what it is called with."""

    def reduce(values: list[float]) -> float:
        events.append(["reduce", list(values)])
        return sum(values)

    class Recorder(api.TorchBatchProcessor):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.last: int | None = None
            ranks = [context.get_distributed_rank(), context.get_distributed_size()]
            events.append(["begin", *ranks, str(context.device)])
            self.model = context.prepare_model_for_inference(torch.nn.Dropout())
            self.total = context.wrap_reducer(reduce, name="total", for_validation=False)

        def process_batch(self, batch: Any, batch_idx: int) -> None:
            output = self.model(self.context.to_device(batch))
            self.total.update(float(output.sum()))
            self.last = batch_idx
            events.append(["process", batch_idx, output.tolist()])

        def on_checkpoint_start(self) -> None:
            events.append(["checkpoint"])
            with self.context.upload_path() as path:
                (path / "parts").mkdir(exist_ok=True)
                (path / "parts" / f"after-{self.last}").write_text(str(self.last))
                (path / "latest").write_text(str(self.last))

        def on_finish(self) -> None:
            events.append(["finish"])

    return Recorder


@contextlib.contextmanager
def determined_off_cluster(storage: Path, latest_checkpoint: str | None, ranks: int) -> Iterator[None]:
    """Let the real one believe in a cluster, but use what it has for local runs in place of the master."""
    det: Any = importlib.import_module("determined")
    config = {"checkpoint_storage": {"type": "shared_fs", "host_path": str(storage)}}
    info = det.ClusterInfo(
        *("http://127.0.0.1:1", "cluster", "agent", list(range(ranks)), "task", "allocation", "token", "TRIAL"),
        latest_checkpoint=latest_checkpoint,
        trial_info=det.TrialInfo(1, 1, 0, {}, config, 0, 0, False, None),
        rendezvous_info=det.RendezvousInfo(["127.0.0.1"], 0, [ranks]),
    )
    init = functools.partial(det.core._context._dummy_init, checkpoint_storage=str(storage))
    with mock.patch.object(det, "get_cluster_info", lambda: info), mock.patch.object(det.core, "init", init):
        yield


def process(side: str, case: dict[str, Any], storage: Path, latest_checkpoint: str | None) -> Events:
    """Process a dataset; return what the processor was called with, and the warnings or the error."""
    events: Events = []
    api = importlib.import_module(f"{side}.pytorch.experimental")
    case = dict(case)
    dataset: Any = [torch.tensor([float(index)]) for index in range(case.pop("records"))]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    own = {"checkpoint_storage": str(storage), "latest_checkpoint": latest_checkpoint} if side != "determined" else {}
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, message="(iterate_length|max_batches)")
        if side == "determined":
            stack.enter_context(determined_off_cluster(storage, latest_checkpoint, ranks))
        distributed = None if ranks == 1 else connect(side)
        try:
            processor = recording_processor(api, events)
            api.torch_batch_process(processor, dataset, distributed_context=distributed, **case, **own)
        except Exception as error:
            events.append(["error", type(error).__name__])
    return [*events, *(["warning"] for _ in caught)]


def checkpoints_in(storage: Path) -> list[Path]:
    """Return the checkpoints of the progress, in the order in which they were written."""
    return sorted((file.parent for file in storage.glob("*/metadata.json")), key=lambda path: path.stat().st_mtime_ns)


def main(side: str, cases: dict[str, dict[str, Any]], output: Path) -> None:
    importlib.import_module(side)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: dict[str, list[Events]] = {}
    for name, case in cases.items():
        storage = output / name
        runs = case.pop("runs", [{}])
        found[name] = []
        for further in runs:
            latest = checkpoints_in(storage)[-1].name if further.pop("resumes", False) else None
            found[name].append(process(side, {**case, **further}, storage, latest))
            if dist.is_initialized():
                dist.barrier()
    (output / f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
