"""What a script prints, and its status, when it ends before its time: Ctrl-C, and hyperparameters given up on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import InvalidHP, pytorch
from det_lightning.callbacks import PreemptionHandler
from det_lightning.checkpoint import CheckpointStorage
from tests.launching import end_of, start, wait
from tests.lightning import pl
from tests.trials import SmallTrial, fit_trial

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")

#: Python itself ends by the signal, or with 1 where an imported library keeps it from that.
STATUS_OF_INTERRUPT = (-signal.SIGINT, 1)


@pytest.mark.slow
def test_invalid_hp_ends_with_one_line(tmp_path: Path) -> None:
    ended = wait(start(tmp_path, "--end", "invalid-hp", "--at", "5"))
    assert (ended.status, ended.output) == (
        0,
        "The trial gave up on its hyperparameters (InvalidHP): the culprit's message. "
        "The process ends with status 0.\n",
    )
    assert len(CheckpointStorage(tmp_path / "checkpoints").list_ids()) == 1


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    ended = wait(start(tmp_path, "--end", "sigint", "--at", "7", "--period"))
    (checkpoint,) = CheckpointStorage(tmp_path / "checkpoints").list_ids()
    assert ended.status in STATUS_OF_INTERRUPT
    assert ended.output == (
        f"Interrupted after 7 batches. Checkpoint {checkpoint} in {tmp_path / 'checkpoints'} has the first 4 batches. "
        f"To continue: fit(latest_checkpoint='{checkpoint}').\n"
    )


@pytest.mark.slow
def test_saved_ctrl_c_resumes(tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    whole = start(straight)
    ended = wait(start(parts, "--end", "sigint", "--at", "7", "--save-on-interrupt"))
    assert ended.status in STATUS_OF_INTERRUPT
    assert "Traceback" not in ended.output
    (checkpoint,) = CheckpointStorage(parts / "checkpoints").list_ids()
    assert f"Interrupted after 8 batches. Checkpoint {checkpoint} in" in ended.output
    assert wait(start(parts, "--latest", checkpoint)).status == 0
    assert wait(whole).status == 0
    assert torch.equal(end_of(parts)["weights"], end_of(straight)["weights"])


def interrupted_at(index: int) -> type[SmallTrial]:
    class Interrupted(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            if batch_idx == index:
                os.kill(os.getpid(), signal.SIGINT)
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Interrupted


def fit(trial_class: type[SmallTrial], storage: Path, callbacks: Any = None, **arguments: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fit_trial(trial_class, callbacks, checkpoint_storage=storage, **{"max_length": pytorch.Batch(9), **arguments})
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_names_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(interrupted_at(3), tmp_path)
    assert not any(Path(pl.__file__).parent in Path(entry.path).parents for entry in raised.traceback)
    assert raised.value.__suppress_context__
    assert "Interrupted after 3 batches. Nothing was saved; " in caplog.text
    assert "PreemptionHandler(save_on_interrupt=True) saves on Ctrl-C." in caplog.text
    fit(SmallTrial, tmp_path)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted_at(12), tmp_path, latest_checkpoint=checkpoint, max_length=pytorch.Batch(15))
    path = str(tmp_path / checkpoint)
    assert f"Nothing was saved since {path}. To continue from there: fit(latest_checkpoint={path!r})." in caplog.text


@pytest.mark.parametrize("signals", [None, []])
def test_ctrl_c_saves_with_other_signals(signals: list[int] | None, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted_at(3), tmp_path, callbacks=PreemptionHandler(signals, save_on_interrupt=True))
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    assert CheckpointStorage(tmp_path).info(checkpoint).metadata["steps_completed"] == 4


def test_invalid_hp_can_be_caught(tmp_path: Path) -> None:
    class GivesUp(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            raise InvalidHP("too large")

    with pytorch.init(enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(GivesUp(context), context, enable_progress_bar=False)
        with pytest.raises(InvalidHP, match="too large"):
            trainer.fit(max_length=pytorch.Batch(9), checkpoint_storage=tmp_path)
