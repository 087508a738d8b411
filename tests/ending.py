"""A training that ends early, as test_preemption.py and test_failing_rank.py ask for on the command line.

Started by torchrun, by a launcher, or as a single process; writes what every rank ended with.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from det_lightning import InvalidHP, core, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint, PreemptionHandler
from tests.lightning import pl
from tests.trials import SmallTrial, seed_everything, weights_of

LENGTH = 24


def raise_error() -> None:
    raise ValueError("the culprit's message")


def raise_invalid_hp() -> None:
    raise InvalidHP("the culprit's message")


def signal_twice() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2.2)
    os.kill(os.getpid(), signal.SIGTERM)


def find_launcher() -> int:
    """Return the pid that ``start`` noted; the parent of a warm process is another one."""
    return int(Path("launcher").read_text())


def signal_launcher(number: int) -> None:
    """Send a signal to the launcher, and wait until it is passed on."""
    arrived: list[int] = []
    before = signal.getsignal(number)
    assert callable(before), "something is to be done about the signal"

    def note(number: int, frame: Any) -> None:
        before(number, frame)
        arrived.append(number)

    signal.signal(number, note)
    os.kill(find_launcher(), number)
    while not arrived:
        time.sleep(0.01)
    signal.signal(number, before)


ENDS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigterm-to-group": lambda: os.killpg(0, signal.SIGTERM),
    "sigterm-to-launcher": lambda: signal_launcher(signal.SIGTERM),
    "sigusr1-to-launcher": lambda: signal_launcher(signal.SIGUSR1),
    "two-signals": signal_twice,
    "sigint": lambda: os.kill(os.getpid(), signal.SIGINT),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "error": raise_error,
    "invalid-hp": raise_invalid_hp,
}


class SignalAtStart(pl.Callback):
    """Sends SIGTERM to this process while Lightning handles it, before anything is trained."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def trial_class(options: argparse.Namespace) -> type[SmallTrial]:
    class Ending(SmallTrial):
        num_workers = options.workers

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.first_batch: int | None = None

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            if self.first_batch is None:
                self.first_batch = batch_idx
            rank = self.context.distributed.rank
            at_once = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if at_once and (batch_idx, rank) == (options.at, options.rank):
                ENDS[options.end]()
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Ending


def run_determined(options: argparse.Namespace) -> SmallTrial:
    several = "WORLD_SIZE" in os.environ
    if several:
        dist.init_process_group("gloo")
    distributed = core.DistributedContext.from_torch_distributed() if several else None
    with pytorch.init(distributed=distributed, enable_tensorboard_logging=False) as context:
        trial = trial_class(options)(context)
        callbacks: list[pl.Callback] = [SignalAtStart()] if options.signal_at_start else []
        callbacks.append(PreemptionHandler(save_on_interrupt=options.save_on_interrupt))
        pytorch.Trainer(trial, context, enable_progress_bar=False, callbacks=callbacks).fit(
            max_length=pytorch.Batch(LENGTH),
            reporting_period=pytorch.Batch(4),
            checkpoint_period=pytorch.Batch(4) if options.period else None,
            checkpoint_policy="none",
            checkpoint_storage=options.folder / "checkpoints",
            latest_checkpoint=options.latest,
        )
    return trial


def run_lightning(options: argparse.Namespace) -> SmallTrial:
    checkpoints = DeterminedCheckpoint(options.folder / "checkpoints", policy="none")
    module = TrialModule(trial_class(options), max_length=pytorch.Batch(LENGTH), reporting_period=pytorch.Batch(4))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy="trial_ddp",
        devices=2,
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=[checkpoints, PreemptionHandler()],
        **quiet,
    )
    trainer.fit(module, ckpt_path=checkpoints.storage.newest() if options.latest else None)
    assert isinstance(module.trial, SmallTrial)
    return module.trial


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trainer", choices=["determined", "lightning"], default="determined")
    parser.add_argument("--end", choices=ENDS, default="none")
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--period", action="store_true")
    parser.add_argument("--latest")
    parser.add_argument("--save-on-interrupt", action="store_true")
    parser.add_argument("--signal-at-start", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything()
    own_rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    (options.folder / f"pid-{own_rank}").write_text(str(os.getpid()))
    trial: Any = {"determined": run_determined, "lightning": run_lightning}[options.trainer](options)
    rank = trial.context.distributed.rank
    torch.save({"weights": weights_of(trial), "first_batch": trial.first_batch}, options.folder / f"end-{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
