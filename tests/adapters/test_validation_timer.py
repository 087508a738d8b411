"""A time as ``val_check_interval``, with a clock that training and validation move."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from det_lightning import pytorch
from det_lightning.adapters import TrialModule, building
from tests.lightning import fit, pl, trainer
from tests.trials import EPOCH_LEN, SmallTrial
from tests.versions import before_lightning_2_6, from_lightning_2_6
from tests.warm_python import WarmPython

THREE_SECONDS = datetime.timedelta(seconds=3)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowTrial(SmallTrial):
    """Takes a second for each batch, and ten for each validation; notes after which batches it was validated."""

    def __init__(self, context: pytorch.PyTorchTrialContext, clock: Clock) -> None:
        super().__init__(context)
        self.clock = clock
        self.trained = context.get_initial_batch()
        self.validated: list[int] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.clock.seconds += 1
        self.trained = batch_idx + 1
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            self.clock.seconds += 10
            self.validated.append(self.trained)
        return super().evaluate_batch(batch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(building, "clock", made)
    return made


def validated_after(clock: Clock, ckpt_path: Path | None = None, **flags: Any) -> list[int]:
    """Return after which batches a run validates."""
    arguments = {name: flags.pop(name) for name in ("validation_period", "max_length") if name in flags}
    module: Any = TrialModule(SlowTrial, trial_kwargs={"clock": clock}, **arguments)
    fit(module, ckpt_path, **flags)
    return module.trial.validated


@from_lightning_2_6
@pytest.mark.parametrize(
    ("flags", "validated"),
    [
        ({"val_check_interval": "00:00:00:03"}, [3, 6, 9, 12]),
        ({"val_check_interval": {"seconds": 3}}, [3, 6, 9, 12]),
        ({"val_check_interval": THREE_SECONDS, "check_val_every_n_epoch": None}, [3, 6, 9, 12]),
        ({"val_check_interval": datetime.timedelta(seconds=3.5)}, [4, 8, 12]),
        ({"val_check_interval": "00:00:01:00"}, []),
        ({"val_check_interval": "00:00:01:00", "max_length": pytorch.Batch(9)}, [9]),
        ({"val_check_interval": THREE_SECONDS, "check_val_every_n_epoch": 2}, [8, 11, 14]),
        ({"val_check_interval": THREE_SECONDS, "validation_period": pytorch.Batch(5)}, [5, 10]),
        ({"val_check_interval": THREE_SECONDS, "limit_val_batches": 0}, []),
        ({"val_check_interval": THREE_SECONDS, "fast_dev_run": True}, [1]),
    ],
)
def test_a_validation_follows_the_time(clock: Clock, flags: dict[str, Any], validated: list[int]) -> None:
    assert EPOCH_LEN == 7
    assert validated_after(clock, **{"max_epochs": 2, **flags}) == validated


@from_lightning_2_6
def test_a_resumed_run_measures_anew(clock: Clock, tmp_path: Path) -> None:
    every_epoch = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True)
    assert validated_after(clock, callbacks=[every_epoch], val_check_interval=THREE_SECONDS) == [3, 6]
    clock.seconds += 3600
    flags = {"max_epochs": 2, "val_check_interval": THREE_SECONDS}
    assert validated_after(clock, tmp_path / "epoch=0.ckpt", **flags) == [10, 13]


@from_lightning_2_6
def test_callbacks_look_after_validations(clock: Clock, tmp_path: Path) -> None:
    best = pl.callbacks.ModelCheckpoint(tmp_path, monitor="validation_loss", save_top_k=-1)
    patience = pl.callbacks.EarlyStopping("validation_loss", patience=1, min_delta=1e6)
    flags: dict[str, Any] = {"max_epochs": 3, "val_check_interval": THREE_SECONDS, "callbacks": [best, patience]}
    assert validated_after(clock, **flags) == [3, 6]
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


@from_lightning_2_6
def test_a_trainer_keeps_its_time(clock: Clock) -> None:
    lightning = trainer(val_check_interval=THREE_SECONDS)
    for _ in range(2):
        lightning.fit_loop.epoch_progress.reset()
        module: Any = TrialModule(SlowTrial, trial_kwargs={"clock": clock})
        lightning.fit(module)
        assert module.trial.validated == [3, 6]


@before_lightning_2_6
def test_older_lightnings_take_no_time() -> None:
    with pytest.raises(TypeError, match="not supported between instances"):
        trainer(val_check_interval=THREE_SECONDS)


RANKS = """
import datetime
from det_lightning.adapters import TrialModule, building
from tests.adapters.test_validation_timer import Clock, SlowTrial, trainer

building.clock = clock = Clock()

class RankTrial(SlowTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.clock.seconds += 100 * self.context.distributed.rank
        return super().train_batch(batch, epoch_idx, batch_idx)

module = TrialModule(RankTrial, trial_kwargs={"clock": clock})
interval = datetime.timedelta(seconds=3)
trainer(max_epochs=2, strategy="trial_ddp", devices=2, val_check_interval=interval).fit(module)
# In one piece, so that the lines of two ranks do not mix.
print(f"rank {module.context.distributed.rank} validated {module.trial.validated}\\n", end="", flush=True)
"""


@pytest.mark.slow
@from_lightning_2_6
def test_the_chiefs_clock_decides(warm_python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = warm_python.run(tmp_path / "ranks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 validated [3, 6]" in done.stdout
    assert "rank 1 validated [3, 6]" in done.stdout
