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
    """Trains manually, several batches a step where a test wants it to, and records what Lightning does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.validations: list[int] = []
        self.steps = 0

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        self.steps += 1
        self.train_one(next(dataloader_iter)[0])
        self.after_batch(dataloader_iter)

    def train_one(self, batch: torch.Tensor) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        self.manual_backward(self.step(batch))
        optimizer.step()
        optimizer.zero_grad()

    def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
        """Leave it at one batch."""

    def on_validation_start(self) -> None:
        self.validations.append(self.steps)


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


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "not announced"])
def test_checkpoint_waits_for_an_announced_validation(announced: bool, tmp_path: Path) -> None:
    class Watcher(pl.callbacks.ModelCheckpoint):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().on_validation_end(trainer, pl_module)
            saved_by_then.append(len(list(tmp_path.glob("*.ckpt"))))

    saved_by_then: list[int] = []
    trainer = make_trainer(use_trial_loops=True, callbacks=[Watcher(tmp_path)])
    lightning_loops.allow_validation(trainer, due=True)
    if not announced:
        lightning_internals.announce_no_validations(trainer)
    trainer.fit(Watched())
    assert saved_by_then[-1] == (0 if announced else 1)


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
    assert trainer.lightning_module is module
    assert trainer.world_size == 2
    for name in ("launcher", "accelerator", "parallel_devices", "cluster_environment", "precision_plugin"):
        assert getattr(other, name) is getattr(given, name)
    assert other.process_group_backend == "gloo"
    assert vars(other)["_timeout"] == processes["timeout"]
    assert lightning_internals.converts_batch_norms(other)
    assert lightning_internals.read_ddp_options(other)[0]["static_graph"]
    assert trainer.strategy is other


def test_batch_size_is_found_where_lightning_refuses_to() -> None:
    sizes: list[int | None] = []

    class Module(Watched):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            sizes.append(lightning_internals.find_batch_size(self, counts=True))
            sizes.append(lightning_internals.find_batch_size(self, counts=False))

        def on_train_epoch_start(self) -> None:
            sizes.append(lightning_internals.find_batch_size(self, counts=True))

        on_validation_epoch_start = on_train_epoch_start

        def training_step(self, dataloader_iter: Iterator[Any]) -> None:
            loop: Any = self.trainer.fit_loop.epoch_loop
            self.train_one(loop.shown)

    module = Module()
    assert lightning_internals.find_batch_size(module, counts=True) is None
    trainer = make_trainer(use_trial_loops=True, limit_train_batches=1)
    lightning_loops.use_calls(trainer, lightning_loops.TrialCalls(lambda: (torch.ones(5, 32), 0)))
    trainer.fit(module)
    # In training Lightning refuses to find it out, elsewhere it does.
    assert sizes[:3] == [1, 5, 1]
    assert sizes[-1] is None


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


def test_single_process_keeps_its_exit_code() -> None:
    assert lightning_internals.choose_exit_code(make_trainer(), 75) == 75


def test_sync_batchnorm_is_seen_in_the_strategy() -> None:
    for synchronized in (True, False):
        strategy: Any = make_trainer(strategy=pl.strategies.DDPStrategy(), sync_batchnorm=synchronized).strategy
        assert lightning_internals.converts_batch_norms(strategy) == synchronized


def test_missing_length_is_no_warning_of_1000_epochs(recwarn: pytest.WarningsRecorder) -> None:
    make_trainer(max_epochs=None)
    assert not [str(warning.message) for warning in recwarn if "1000 epochs" in str(warning.message)]


def test_plain_optimizer_has_all_that_lightning_asks_for() -> None:
    """Since Python 3.12, isinstance() of a protocol finds attributes of the object and its class only."""
    for name in ("step", "state_dict", "load_state_dict", "zero_grad", "param_groups", "defaults", "state"):
        inspect.getattr_static(PlainOptimizer(object()), name)
