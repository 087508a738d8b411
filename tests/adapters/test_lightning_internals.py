"""What the adapters rely on in Lightning beyond its documentation, where no run of a trial shows it."""

from __future__ import annotations

import datetime
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from packaging.version import Version

from det_lightning.adapters import lightning_internals, lightning_loops
from det_lightning.adapters.inference import PlainOptimizer
from det_lightning.adapters.strategies.per_model import PerModelDDPStrategy
from tests.lightning import BoringModel, lightning_version, pl, trainer

#: An interval that has always passed; Lightning 2.4 takes one of no length at all for none.
AT_ONCE = datetime.timedelta(microseconds=1)


class Watched(BoringModel):
    """Trains manually, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        self.steps += 1
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        self.manual_backward(self.step(next(dataloader_iter)[0]))
        optimizer.step()
        optimizer.zero_grad()


def make_trainer(use_trial_loops: bool = False, **flags: Any) -> pl.Trainer:
    made = trainer(**{"limit_train_batches": 6, "limit_val_batches": 1, "num_sanity_val_steps": 0, **flags})
    if use_trial_loops:
        lightning_loops.use_trial_loops(made)
    return made


def fitted(module_class: type[Watched] = Watched, **flags: Any) -> Watched:
    """Train with a trainer that has the flags; return the module."""
    module = module_class()
    make_trainer(**flags).fit(module)
    return module


@pytest.mark.parametrize(("flag", "limit"), [(3, 3), (1, 1), (0.5, 32), (1.0, None)])  # of 64 batches
def test_limit_val_batches_is_read_as_a_number(flag: float, limit: int | None) -> None:
    limits: list[int | None] = []

    class Module(Watched):
        def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
            limits.append(lightning_loops.read_validation_limit(self.trainer, dataloader_iter))
            next(dataloader_iter)
            lightning_internals.end_epoch(dataloader_iter)

    fitted(Module, limit_train_batches=1, limit_val_batches=flag)
    assert limits == [limit]


def test_epoch_loop_can_be_replaced_once() -> None:
    trainer = make_trainer(use_trial_loops=True)
    loop: Any = trainer.fit_loop.epoch_loop
    lightning_loops.use_trial_loops(trainer)
    assert trainer.fit_loop.epoch_loop is loop


def test_replaced_loop_leaves_out_the_exchange_of_signals() -> None:
    if Version(lightning_version) >= Version("2.5.2"):  # the first that exchanges them
        assert callable(type(make_trainer().fit_loop.epoch_loop)._broadcast_sigterm_tensor)
    loop = type(make_trainer(use_trial_loops=True).fit_loop.epoch_loop)
    assert "_broadcast_sigterm_tensor" in vars(loop)


def test_wrap_policy_of_classes_is_read_as_a_function() -> None:
    strategy = pl.strategies.FSDPStrategy(auto_wrap_policy={torch.nn.Linear})
    options, others = lightning_internals.read_fsdp_options(strategy)
    assert [options["policy"](module) for module in (torch.nn.Linear(1, 1), torch.nn.ReLU())] == [True, False]
    assert others == []


def test_strategy_can_be_replaced_before_the_launch() -> None:
    """The other strategy has the devices, the launcher and the process group of the given one, not its options."""
    processes: dict[str, Any] = {"process_group_backend": "gloo", "timeout": datetime.timedelta(seconds=5)}
    given: Any = PerModelDDPStrategy(start_method="spawn", **processes)
    other: Any = pl.strategies.DDPStrategy(static_graph=True)

    class Module(Watched):
        def check_before_launch(self, trainer: pl.Trainer) -> None:
            lightning_internals.replace_strategy(trainer, other)
            raise NotImplementedError

    module = Module()
    trainer = make_trainer(strategy=given, devices=2, sync_batchnorm=True)
    with pytest.raises(NotImplementedError):
        trainer.fit(module)
    assert (trainer.lightning_module, trainer.world_size) == (module, 2)
    for name in ("launcher", "accelerator", "parallel_devices", "cluster_environment", "precision_plugin"):
        assert getattr(other, name) is getattr(given, name)
    assert other.process_group_backend == "gloo"
    assert vars(other)["_timeout"] == processes["timeout"]
    assert lightning_internals.converts_batch_norms(other)
    without: Any = make_trainer(strategy=pl.strategies.DDPStrategy()).strategy
    assert not lightning_internals.converts_batch_norms(without)
    assert lightning_internals.read_ddp_options(other)[0]["static_graph"]
    assert trainer.strategy is other


class SavingByTime(Watched):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        lightning_internals.publish_metrics(self.trainer, {"loss": torch.tensor(1.0 / self.steps)})
        lightning_internals.save_by_time(self.trainer)


@pytest.mark.parametrize(
    ("interval", "saved"), [(AT_ONCE, 3), (datetime.timedelta(hours=1), 0)], ids=["over", "not yet"]
)
def test_checkpoints_by_time_wait_for_their_interval(interval: datetime.timedelta, saved: int, tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, train_time_interval=interval, save_top_k=-1)
    fitted(SavingByTime, callbacks=[checkpoint], limit_train_batches=3)
    assert len(list(tmp_path.glob("*.ckpt"))) == saved


@pytest.mark.parametrize("monitor", ["missing", "loss"])
def test_checkpoint_by_time_waits_for_its_metric(monitor: str, tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, monitor=monitor, train_time_interval=AT_ONCE, save_last=True)
    fitted(SavingByTime, callbacks=[checkpoint], limit_val_batches=0)
    assert [path.name for path in tmp_path.glob("last.ckpt")] == ["last.ckpt"]
    assert bool(checkpoint.best_model_path) == (monitor == "loss")


def test_hints_of_a_new_trainer_can_be_silenced(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer()
    assert "GPU available" in caplog.text
    caplog.clear()
    with lightning_internals.quiet_hints():
        make_trainer()
    assert "GPU available" not in caplog.text
    assert lightning_internals.get_hint_logger().level != logging.WARNING


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    lightning_internals.set_printing_rank(3)
    printed: list[str] = []
    rank_zero_only(printed.append)("only rank 0 prints this")
    assert not printed


def test_missing_length_is_no_warning_of_1000_epochs(recwarn: pytest.WarningsRecorder) -> None:
    make_trainer(max_epochs=None)
    assert not [str(warning.message) for warning in recwarn if "1000 epochs" in str(warning.message)]


def test_plain_optimizer_has_all_that_lightning_asks_for() -> None:
    """Since Python 3.12, isinstance() of a protocol finds attributes of the object and its class only."""
    for name in ("step", "state_dict", "load_state_dict", "zero_grad", "param_groups", "defaults", "state"):
        inspect.getattr_static(PlainOptimizer(object()), name)
