"""What the adapters rely on in Lightning beyond its documentation: a test for each promise, named after it."""

from __future__ import annotations

import datetime
import functools
import inspect
import itertools
import logging
import signal
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
from det_lightning.checkpoint.format.content import TrialState
from tests.lightning import BoringModel, lightning_version, pl, trainer
from tests.versions import from_lightning_2_6

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


class Asking(Watched):
    """Fails after what it asks before a run begins."""

    def ask(self) -> None:
        raise NotImplementedError

    def configure_callbacks(self) -> Any:
        self.ask()
        raise NotImplementedError

    def check_before_launch(self, trainer: pl.Trainer) -> None:
        self.configure_callbacks()


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


def test_validations_follow_the_batches_that_allow_them() -> None:
    class Module(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            lightning_loops.allow_validation(self.trainer, due=self.steps in (2, 5))

    assert fitted(Module, use_trial_loops=True).validations == [2, 5]


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


@pytest.mark.parametrize(
    ("flags", "validates"),
    [({}, True), ({"min_steps": 3}, False), ({"limit_val_batches": 0}, False), ({"check_val_every_n_epoch": 2}, False)],
    ids=str,
)
def test_a_stop_validates_unless_a_flag_forbids_it(flags: dict[str, Any], validates: bool) -> None:
    class Module(Watched):
        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            asked.append(lightning_internals.validates_at_stop(self.trainer))
            self.trainer.should_stop = True
            asked.append(lightning_internals.validates_at_stop(self.trainer))

    asked: list[bool] = []
    make_trainer(**flags).fit(Module())
    assert asked[:2] == [False, validates]


@from_lightning_2_6
def test_time_as_val_check_interval_is_seen() -> None:
    assert lightning_internals.validates_by_time(make_trainer(val_check_interval="00:01:00:00"))
    assert not lightning_internals.validates_by_time(make_trainer(val_check_interval=0.5))


def test_validation_can_run_within_training() -> None:
    class Module(Watched):
        def on_train_start(self) -> None:
            lightning_internals.run_validation(self.trainer)
            assert self.trainer.training

    assert fitted(Module).validations == [0, 6]


@pytest.mark.parametrize(("end", "steps"), [("epoch", 2 + 6 + 6), ("epoch's training", 6), ("training", 2)])
def test_training_can_end_within_an_epoch(end: str, steps: int) -> None:
    class Module(Watched):
        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            if self.steps == 2 and end == "epoch":
                lightning_internals.end_epoch(dataloader_iter)
            elif self.steps == 2:
                lightning_internals.end_training(self.trainer, early=end == "training")

    assert fitted(Module, min_steps=5, max_epochs=3).steps == steps


def test_step_of_two_batches_counts_two() -> None:
    """A step that holds two batches looks, from outside, as if there had been a step for each."""
    ended: list[tuple[int, int]] = []
    state = TrialState()

    class Module(Watched):
        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            self.train_one(next(dataloader_iter)[0])
            state.batches_trained += 2
            lightning_internals.move_to(self.trainer, state, state.batches_trained, extra_batches=1)
            lightning_loops.show_batch_index(dataloader_iter, state.batches_trained - 1)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            ended.append((batch_idx, self.trainer.fit_loop.batch_idx))

    assert fitted(Module).trainer.global_step == 6
    assert ended == [(1, 1), (3, 3), (5, 5)]


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


@pytest.mark.parametrize(("in_trial", "steps"), [(False, [1, 3, 5]), (True, [2, 4, 6])], ids=["module", "trial"])
def test_loggers_get_the_step_of_the_trial(in_trial: bool, steps: list[int], tmp_path: Path) -> None:
    class Module(Watched):
        def on_train_start(self) -> None:
            if in_trial:
                lightning_loops.allow_validation(self.trainer, due=False)
                lightning_internals.show_logging_step(self.trainer, 1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("value", 0.25, batch_size=1)

    class Steps(pl.loggers.CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            logged.extend([step] if "value" in metrics else [])

    logged: list[int | None] = []
    fitted(Module, use_trial_loops=in_trial, logger=Steps(tmp_path), log_every_n_steps=2, limit_val_batches=0)
    assert logged == steps


def test_global_step_can_be_set() -> None:
    class Module(Watched):
        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            lightning_internals.show_optimizer_steps(self.trainer, 10 * self.steps)
            assert self.trainer.global_step == 10 * self.steps

    assert fitted(Module).trainer.global_step == 60


def test_called_hook_reaches_callbacks_then_module_and_may_log() -> None:
    """A hook of callbacks and of the module, in this order; what is logged there is known by the hook's name."""
    called: list[tuple[str, Any]] = []

    class Module(Watched):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            called.append(("module", loss))
            self.log("logged", loss, batch_size=1)

        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            lightning_internals.call_hook(self.trainer, "on_before_backward", torch.tensor(0.5))

    callback = pl.callbacks.LambdaCallback(on_before_backward=lambda _, __, loss: called.append(("callback", loss)))
    module = fitted(Module, callbacks=[callback], limit_train_batches=1)
    # The first two are Lightning's own calls.
    assert called[2:] == [("callback", torch.tensor(0.5)), ("module", torch.tensor(0.5))]
    assert module.trainer.callback_metrics["logged"] == 0.5


def test_called_hook_of_a_module_has_its_name() -> None:
    class Module(Watched):
        def on_fit_end(self) -> None:
            ended.append(self._current_fx_name)

    ended: list[str | None] = []
    lightning_internals.call_module_hook(fitted(Module, limit_train_batches=1).trainer, "on_fit_end")
    assert ended == ["on_fit_end"] * 2


def test_dataloader_iter_is_seen_through_one_decorator() -> None:
    def decorated(step: Any) -> Any:
        return functools.wraps(step)(lambda *arguments: step(*arguments))

    step = Watched().training_step
    assert lightning_internals.takes_dataloader_iter(decorated(step))
    assert not lightning_internals.takes_dataloader_iter(decorated(decorated(step)))
    assert not lightning_internals.takes_dataloader_iter(BoringModel().training_step)


def test_calls_of_a_trial_follow_the_hooks() -> None:
    """After the hooks at the end of a step and of a validation, of callbacks and of the module."""
    order: list[str] = []

    class Module(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            order.append("step")

        def on_validation_end(self) -> None:
            order.append("validation")

    trainer = make_trainer(use_trial_loops=True, limit_train_batches=1)
    calls = [lambda name=name: order.append(f"after {name}") for name in ("step", "batch", "validation")]
    lightning_loops.use_calls(trainer, lightning_loops.TrialCalls(None, None, *calls))
    trainer.fit(Module())
    assert order == ["step", "after step", "after batch", "validation", "after validation"]
    lightning_loops.use_calls(trainer, lightning_loops.TrialCalls())
    trainer.validate(Module(), verbose=False)
    assert order[5:] == ["validation"]


def test_trial_is_saved_after_and_loaded_before_the_hooks_of_its_module(tmp_path: Path) -> None:
    class Module(Watched):
        def add_trial(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["trial"] = 5

        def take_trial(self, checkpoint: dict[str, Any]) -> None:
            taken.append(checkpoint["trial"])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert "trial" not in checkpoint

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert taken

    taken: list[int] = []
    for weights_only in (False, True):
        trainer = fitted(Module, use_trial_loops=True, limit_train_batches=1).trainer
        trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only)
        again = make_trainer(use_trial_loops=True)
        again.validate(Module(), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
    assert taken == [5, 5]


def test_training_can_begin_at_a_later_epoch() -> None:
    move = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, _: lightning_internals.move_to_epoch(trainer, 3))
    module = fitted(max_epochs=5, callbacks=[move])
    assert (module.trainer.current_epoch, module.steps) == (5, 2 * 6)


def test_epoch_loop_can_be_replaced_once() -> None:
    trainer = make_trainer(use_trial_loops=True)
    loop: Any = trainer.fit_loop.epoch_loop
    assert isinstance(loop, lightning_loops.TrialEpochLoop)
    lightning_loops.use_trial_loops(trainer)
    assert trainer.fit_loop.epoch_loop is loop


def test_replaced_loop_trains_and_validates_like_lightnings() -> None:
    module, trainer = Watched(), make_trainer(use_trial_loops=True)
    trainer.fit(module)
    assert (module.steps, module.validations) == (6, [6])
    assert trainer.validate(module, verbose=False)
    assert module.validations == [6, 6]


def test_replaced_loop_leaves_out_the_exchange_of_signals() -> None:
    if Version(lightning_version) >= Version("2.5.2"):  # the first that exchanges them
        assert callable(type(make_trainer().fit_loop.epoch_loop)._broadcast_sigterm_tensor)
    loop = type(make_trainer(use_trial_loops=True).fit_loop.epoch_loop)
    assert "_broadcast_sigterm_tensor" in vars(loop)


def test_hooks_get_batches_and_outputs_of_a_trial() -> None:
    """The hooks at the start of a step get its batch, and those at its end what the step returned, also no tensor."""
    batches = [(torch.ones(1, 32), 3), (torch.zeros(1, 32), 4)]

    class Module(Watched):
        def training_step(self, dataloader_iter: Iterator[Any]) -> dict[str, Any]:
            batch = loop.shown
            self.steps += 1
            self.train_one(batch)
            if self.steps == 2:
                lightning_internals.end_epoch(dataloader_iter)
            return {"loss": None, "sum": float(batch.sum())}

        def validation_step(self, dataloader_iter: Iterator[Any]) -> Any:
            return {"shown": tuple(lightning_loops.get_shown_batch(dataloader_iter).shape)}

        def on_validation_epoch_end(self) -> None:
            """There is nothing to average."""

    seen: list[Any] = []
    watcher = pl.callbacks.LambdaCallback(
        on_train_batch_start=lambda trainer, module, *rest: seen.append(rest),
        on_train_batch_end=lambda trainer, module, *rest: seen.append(rest),
        on_validation_batch_start=lambda trainer, module, batch, index, *_: seen.append((batch.shape, index)),
        on_validation_batch_end=lambda trainer, module, outputs, *_: seen.append(outputs),
    )
    trainer = make_trainer(use_trial_loops=True, limit_val_batches=2, callbacks=[watcher])
    data = [torch.ones(1, 5)] * 3
    calls = lightning_loops.TrialCalls(iter(batches).__next__, lambda limit: itertools.islice(data, limit))
    lightning_loops.use_calls(trainer, calls)
    loop: Any = trainer.fit_loop.epoch_loop
    trainer.fit(Module())
    assert loop.shown is None
    one, other = batches
    training = [one, ({"loss": None, "sum": 32.0}, *one), other, ({"loss": None, "sum": 0.0}, *other)]
    assert seen == [*training, ((1, 5), 0), {"shown": (1, 5)}, ((1, 5), 1), {"shown": (1, 5)}]


class OnlyTraining(pl.LightningDataModule):
    def train_dataloader(self) -> list[int]:
        return [7]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({}, {}),
        ({"train_dataloaders": [1]}, {"train_dataloader": [1]}),
        ({"train_dataloaders": [1], "val_dataloaders": [2]}, {"train_dataloader": [1], "val_dataloader": [2]}),
        ({"train_dataloaders": [1], "val_dataloaders": []}, {"train_dataloader": [1], "val_dataloader": ()}),
        ({"datamodule": OnlyTraining()}, {"train_dataloader": [7], "val_dataloader": ()}),
        ({"dataloaders": [1]}, {"val_dataloader": [1]}),
    ],
    ids=["nothing", "training data", "both", "no validation data", "a data module", "data of validate"],
)
def test_data_given_to_a_call_are_found(arguments: dict[str, Any], given: dict[str, Any]) -> None:
    class Module(Asking):
        def ask(self) -> None:
            assert lightning_internals.find_datamodule(self.trainer) is arguments.get("datamodule")
            taken = lightning_internals.take_call_dataloaders(self.trainer)
            assert {name: give() for name, give in taken.items()} == given
            source: Any = self.trainer.fit_loop._data_source
            assert is_validation or source.instance is self

    is_validation, trainer = "dataloaders" in arguments, make_trainer()
    with pytest.raises(NotImplementedError):
        (trainer.validate if is_validation else trainer.fit)(Module(), **arguments)


@pytest.mark.parametrize("data", [None, [1]], ids=["none", "a list"])
def test_data_for_test_and_predict_are_seen(data: Any) -> None:
    class Module(Asking):
        test_dataloader = pl.LightningModule.test_dataloader
        predict_dataloader = pl.LightningModule.predict_dataloader

        def ask(self) -> None:
            assert lightning_internals.has_data(self.trainer) == bool(data)

    for call in (make_trainer().test, make_trainer().predict):
        with pytest.raises(NotImplementedError):
            call(Module(), data)


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
def test_launcher_starts_nothing_before_the_last_check(start_method: Any) -> None:
    """The strategies call ``lightning_internals.make_launcher``."""

    class Module(Asking):
        def check_before_launch(self, trainer: pl.Trainer) -> None:
            assert trainer.lightning_module is self
            raise NotImplementedError

    strategy = PerModelDDPStrategy(start_method=start_method)
    with pytest.raises(NotImplementedError):
        fitted(Module, strategy=strategy, devices=2)
    assert getattr(strategy.launcher, "procs", None) == []


def test_options_of_ddp_are_read() -> None:
    read = lightning_internals.read_ddp_options
    assert read(pl.strategies.DDPStrategy(static_graph=True)) == ({"static_graph": True}, [])
    with_hooks = pl.strategies.DDPStrategy(ddp_comm_hook=print, model_averaging_period=3)
    assert read(with_hooks)[1] == ["ddp_comm_hook", "model_averaging_period"]


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        ({}, []),
        ({"auto_wrap_policy": lambda **_: True}, ["auto_wrap_policy"]),
        ({"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, ["cpu_offload", "sharding_strategy"]),
        ({"activation_checkpointing_policy": {torch.nn.Linear}}, ["activation_checkpointing"]),
        ({"state_dict_type": "sharded", "limit_all_gathers": True}, ["state_dict_type", "limit_all_gathers"]),
        ({"timeout": datetime.timedelta(seconds=5), "process_group_backend": "gloo"}, []),
    ],
    ids=["nothing", "a wrap policy", "offload and strategy", "activation checkpointing", "shards", "process group"],
)
def test_options_of_fsdp_without_a_counterpart_are_named(arguments: dict[str, Any], others: list[str]) -> None:
    assert lightning_internals.read_fsdp_options(pl.strategies.FSDPStrategy(**arguments)) == ({}, others)


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


def test_restricted_classmethod_refuses_an_instance() -> None:
    class Module(Watched):
        @lightning_internals.restricted_classmethod
        def name(cls) -> str:  # noqa: N805 (a classmethod)
            return cls.__name__

    assert Module.name() == "Module"
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        Module().name()


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


def test_report_is_logged_and_other_metrics_are_published_only() -> None:
    class Module(Watched):
        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            lightning_internals.publish_metrics(self.trainer, {"mean": torch.tensor(0.25)})
            lightning_internals.show_report(self.trainer, {"loss": torch.tensor(0.5)}, {"loss": 0.5})
            assert self.trainer.progress_bar_metrics["loss"] == 0.5

    trainer = fitted(Module).trainer
    assert trainer.callback_metrics["loss"] == trainer.logged_metrics["loss"] == 0.5
    assert trainer.callback_metrics["mean"] == 0.25
    assert "mean" not in trainer.logged_metrics


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


def test_keyboard_interrupt_leaves_fit() -> None:
    class Module(Watched):
        def after_batch(self, dataloader_iter: Iterator[Any]) -> None:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), lightning_internals.reraise_keyboard_interrupt():
        fitted(Module)
    assert signal.getsignal(signal.SIGINT) is before


def test_sync_batchnorm_is_seen_in_the_strategy() -> None:
    for synchronized in (True, False):
        strategy: Any = make_trainer(strategy=pl.strategies.DDPStrategy(), sync_batchnorm=synchronized).strategy
        assert lightning_internals.converts_batch_norms(strategy) == synchronized


def test_optimizer_can_be_unwrapped() -> None:
    wrapped: Any = fitted(limit_train_batches=1).optimizers()
    assert type(wrapped) is not torch.optim.SGD
    assert type(lightning_internals.unwrap_optimizer(wrapped)) is torch.optim.SGD
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    assert lightning_internals.unwrap_optimizer(plain) is plain


@pytest.mark.parametrize(("epochs", "steps"), [(-1, 14), (2, 12)])
def test_epochs_can_be_limited_during_a_run(epochs: int, steps: int) -> None:
    limit = pl.callbacks.LambdaCallback(on_fit_start=lambda t, _: lightning_internals.limit_epochs(t, epochs))
    assert fitted(max_steps=14, callbacks=[limit]).steps == steps


def test_missing_length_is_no_warning_of_1000_epochs(recwarn: pytest.WarningsRecorder) -> None:
    make_trainer(max_epochs=None)
    assert not [str(warning.message) for warning in recwarn if "1000 epochs" in str(warning.message)]


def test_plain_optimizer_has_all_that_lightning_asks_for() -> None:
    """Since Python 3.12, isinstance() of a protocol finds attributes of the object and its class only."""
    for name in ("step", "state_dict", "load_state_dict", "zero_grad", "param_groups", "defaults", "state"):
        inspect.getattr_static(PlainOptimizer(object()), name)


def test_every_reach_has_a_test() -> None:
    calls = Path(__file__).read_text()
    own = [
        name
        for module in (lightning_internals, lightning_loops)
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert len(own) > 10
    assert [name for name in own if f".{name}" not in calls] == []
