"""What the ranks of a training exchange at its boundaries, and for what they wait there."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import pytorch_lightning as pl
from fsspec.implementations.memory import MemoryFileSystem
from pytorch_lightning.loggers.logger import DummyLogger

from det_lightning import pytorch
from det_lightning.core import DistributedContext
from tests.conformance.trials import callback
from tests.ranks.ranks import in_processes
from tests.trials import SmallTrial, seed_everything

pytestmark = pytest.mark.slow

PERIOD = 4
LENGTH = 16
WAIT_S = 20.0


class CalledExchanges:
    """Notes the exchanges of this thread over the process group and over the store, by name; watches the real ones."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._names = {
            "torch.distributed.distributed_c10d": {"all_gather_object": "group", "broadcast_object_list": "group"},
            "det_lightning.ranks.exchange": {"_take_part": "store"},
        }

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names = self._names.get(frame.f_globals.get("__name__", ""), {})
            if name := names.get(frame.f_code.co_name):
                self.found.append(name)


def train(
    context: DistributedContext,
    folder: Path,
    trial_class: Callable[[Any], SmallTrial] = SmallTrial,
    lightning: dict[str, Any] | None = None,
    **fit: Any,
) -> SmallTrial:
    """Train on the ranks of a process group, a report every four batches."""
    own = folder / f"rank{context.rank}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    seed_everything()
    periods: dict[str, Any] = {"max_length": pytorch.Batch(LENGTH), "reporting_period": pytorch.Batch(PERIOD)}
    fit = {**periods, "checkpoint_policy": "none", "checkpoint_storage": folder / "checkpoints", **fit}
    hparams = {"global_batch_size": 8}
    with pytorch.init(hparams=hparams, distributed=context, enable_tensorboard_logging=False) as trial_context:
        trial = trial_class(trial_context)
        pytorch.Trainer(trial, trial_context, enable_progress_bar=False, **(lightning or {})).fit(**fit)
        return trial


def appears(path: Path) -> bool:
    """Wait for a file; return whether it is there."""
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return path.exists()


def exchanges_at_reports(
    context: DistributedContext, folder: Path, trial_class: type[SmallTrial] = SmallTrial, **fit: Any
) -> dict[int, list[str]]:
    """Return what this rank exchanges after each batch, until the next one begins."""
    called = CalledExchanges()
    after: dict[int, list[str]] = {}

    class Marking(trial_class):  # type: ignore[misc,valid-type]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            after[batch_idx] = called.found = []
            return {"loss": super().train_batch(batch, epoch_idx, batch_idx)["loss"]}

    sys.setprofile(called)
    train(context, folder, Marking, **fit)
    sys.setprofile(None)
    # Batch N is followed by the exchanges noted when batch N began.
    return {batch_idx + 1: list(found) for batch_idx, found in after.items() if batch_idx + 1 < LENGTH}


def test_boundary_takes_one_exchange(tmp_path: Path) -> None:
    """A validation adds one. The ranks meet at the store first, which names one that is missing."""
    period = pytorch.Batch(3 * PERIOD)
    run = functools.partial(exchanges_at_reports, folder=tmp_path, validation_period=period)
    for after in in_processes(2, tmp_path, run):
        expected = {PERIOD: 1, 2 * PERIOD: 1, 3 * PERIOD: 2}
        assert after == {batch: ["store", "group"] * expected.get(batch, 0) for batch in after}


class SlowLogger(DummyLogger):
    """Is done with a metric only once another rank has begun the batch that follows."""

    def __init__(self, metric: str, begun: Path) -> None:
        super().__init__()
        self.metric = metric
        self.begun = begun
        self.was_passed: list[bool] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.metric in metrics:
            self.was_passed.append(appears(self.begun))


@pytest.mark.parametrize("metric", ["loss", "validation_loss"])
def test_no_rank_waits_for_loggers(metric: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def run(context: DistributedContext) -> list[bool]:
        class Announcing(SmallTrial):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
                if context.rank == 1 and batch_idx == PERIOD:
                    begun.touch()
                return super().train_batch(batch, epoch_idx, batch_idx)

        logger = SlowLogger(metric, begun)
        validation = {"validation_period": pytorch.Batch(PERIOD)} if "validation" in metric else {}
        train(context, tmp_path, Announcing, {"logger": logger if context.rank == 0 else False}, **validation)
        return logger.was_passed

    of_chief, _ = in_processes(2, tmp_path, run)
    assert len(of_chief) >= LENGTH // PERIOD
    assert all(of_chief)


class SlowStorage(MemoryFileSystem):
    """Memory in which a file is written only once ``begun`` is there."""

    protocol = "slow"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    begun: ClassVar[Path]
    was_passed: ClassVar[list[bool]] = []

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        if "state_dict" in rpath:
            self.was_passed.append(appears(self.begun))
        super().put_file(lpath, rpath, *args, **kwargs)


def test_no_rank_waits_for_an_upload(tmp_path: Path) -> None:
    """The upload of the checkpoint after the first boundary ends once the other rank is beyond the third one."""
    SlowStorage.begun = tmp_path / "begun"
    fsspec.register_implementation("slow", SlowStorage, clobber=True)

    def run(context: DistributedContext) -> tuple[dict[int, list[str]], list[bool], list[int]]:
        complete: list[int] = []

        class Noting(pytorch.PyTorchCallback):
            def on_checkpoint_upload_end(self, uuid: str) -> None:
                complete.append(len(complete))

        class Announcing(SmallTrial):
            def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
                return {"counter": self.counter, "noting": Noting()}

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
                if (context.rank, batch_idx) == (1, 3 * PERIOD):
                    SlowStorage.begun.touch()
                return super().train_batch(batch, epoch_idx, batch_idx)

        fit: dict[str, Any] = {"checkpoint_period": pytorch.Batch([PERIOD]), "checkpoint_storage": "slow://bucket"}
        after = exchanges_at_reports(context, tmp_path, Announcing, **fit)
        return after, SlowStorage.was_passed, complete

    for rank, (after, was_passed, complete) in enumerate(in_processes(2, tmp_path, run)):
        assert [after[batch] for batch in (2 * PERIOD, 3 * PERIOD)] == [["store", "group"]] * 2
        assert complete == [0, 1]
        assert was_passed == ([True, True] if rank == 0 else [])


class BytesRead:
    """Counts the bytes that this rank reads from the store in exchanges of objects; watches the real ones."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, found: Any) -> None:
        is_exchange = frame.f_globals.get("__name__") == "det_lightning.ranks.exchange"
        if event == "return" and is_exchange and frame.f_code.co_name == "_take_part":
            self.count += sum(map(len, found or []))


def test_checkpoint_state_goes_to_the_chief(tmp_path: Path) -> None:
    def run(context: DistributedContext) -> int:
        read = BytesRead()
        sys.setprofile(read)
        train(context, tmp_path, checkpoint_period=pytorch.Batch(PERIOD))
        sys.setprofile(None)
        return read.count

    of_chief, of_other = in_processes(2, tmp_path, run)
    checkpoints = LENGTH // PERIOD
    assert of_chief > checkpoints * 10_000
    assert of_other < checkpoints * 1_000


@pytest.mark.parametrize(
    "hook", ["on_training_workload_end", "on_validation_end", "on_checkpoint_upload_end", "on_train_batch_end"]
)
def test_stop_of_one_rank_stops_all(hook: str, tmp_path: Path) -> None:
    """Wanted at the second boundary, also after the metrics of the ranks are reduced; the last hook is Lightning's."""

    def run(context: DistributedContext) -> int:
        trained: list[pytorch.PyTorchTrialContext] = []

        def ask(*_: Any, **__: Any) -> None:
            if context.rank == 1 and len(trained) == 2 * PERIOD:
                trained[0].set_stop_requested(True)

        class Stopping(SmallTrial):
            def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
                asks = context.rank == 1 and hook != "on_train_batch_end"
                return {"counter": self.counter, **({"asks": callback(pytorch, **{hook: ask})} if asks else {})}

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
                trained.append(self.context)
                return super().train_batch(batch, epoch_idx, batch_idx)

        lightning = pl.Callback()
        if hook == "on_train_batch_end":
            lightning.on_train_batch_end = ask  # type: ignore[method-assign]
        periods = {"validation_period": pytorch.Batch(PERIOD)}
        if hook == "on_checkpoint_upload_end":
            periods["checkpoint_period"] = pytorch.Batch([2 * PERIOD])
        train(context, tmp_path, Stopping, {"callbacks": [lightning]}, **periods)
        return len(trained)

    assert in_processes(2, tmp_path, run) == [2 * PERIOD] * 2
