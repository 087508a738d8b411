"""A process that is asked to go saves its run and ends; started again it ends as one that was left alone."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import InvalidHP, errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint, PreemptionHandler
from det_lightning.checkpoint import CheckpointStorage
from tests import lightning
from tests.ending import SignalAtStart
from tests.launching import LAUNCHER, TORCHRUN, end_of, start, wait
from tests.lightning import pl
from tests.trials import SmallTrial, fit_trial, seed_everything, weights_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")

LENGTH, AT = 24, 7


def trial_that(does: Callable[[Any], Any], at: int = AT) -> type[SmallTrial]:
    """Return a trial that does something with its context before it trains on batch number ``at``."""

    class Doing(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            if batch_idx == at:
                does(self.context)
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Doing


def send(number: int) -> Callable[[Any], None]:
    return lambda context: os.kill(os.getpid(), number)


def train(storage: Path, trial_class: type[SmallTrial] = SmallTrial, **arguments: Any) -> Any:
    seed_everything()
    return fit_trial(trial_class, max_length=pytorch.Batch(LENGTH), checkpoint_storage=storage, **arguments)


def steps_of(storage: Path) -> list[int]:
    known = CheckpointStorage(storage)
    return [known.info(name).metadata["steps_completed"] for name in known.list_ids()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_process_saves_and_goes_on(number: int, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight")
    before = signal.getsignal(number)
    with pytest.raises(errors.Preempted) as raised:
        train(tmp_path / "parts", trial_that(send(number)))
    assert raised.value.code == errors.PREEMPTED_EXIT_CODE == 75
    assert signal.getsignal(number) is before
    # The next boundary would have been the end.
    assert steps_of(tmp_path / "parts") == [AT + 1]
    assert torch.equal(weights_of(train(tmp_path / "parts", latest_checkpoint="last")), weights_of(straight))


def test_lightning_saves_and_resumes(tmp_path: Path) -> None:
    parts = tmp_path / "parts"

    def fit(trial_class: type[SmallTrial], storage: Path = parts, **arguments: Any) -> Any:
        module = TrialModule(trial_class)
        callbacks = [DeterminedCheckpoint(storage, policy="none"), PreemptionHandler([signal.SIGUSR2], exit_code=3)]
        # A process that has to go does not wait for min_epochs.
        lightning.fit(module, max_steps=2 * LENGTH, min_epochs=3, callbacks=callbacks, **arguments)
        return module.trial

    straight = fit(SmallTrial, tmp_path / "straight")
    with pytest.raises(errors.Preempted) as raised:
        fit(trial_that(send(signal.SIGUSR2)))
    assert raised.value.code == 3
    resumed = fit(SmallTrial, ckpt_path=CheckpointStorage(parts).newest())
    assert torch.equal(weights_of(resumed), weights_of(straight))


def test_user_handlers_are_restored(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, mine)
    try:
        for does, error in ((send(signal.SIGTERM), errors.Preempted), (lambda context: 1 / 0, ZeroDivisionError)):
            with pytest.raises(error):
                train(tmp_path, trial_that(does))
            assert signal.getsignal(signal.SIGTERM) is mine
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_preemption_can_be_switched_off(tmp_path: Path) -> None:
    handlers: list[Any] = []
    looks = trial_that(lambda context: handlers.append(signal.getsignal(signal.SIGUSR1)))
    train(tmp_path, looks, callbacks=[PreemptionHandler(signals=[])])
    assert handlers == [signal.getsignal(signal.SIGUSR1)]


def test_stop_request_is_no_preemption(tmp_path: Path) -> None:
    def stop(context: Any) -> None:
        context.set_stop_requested(True)
        os.kill(os.getpid(), signal.SIGTERM)

    train(tmp_path, trial_that(stop), reporting_period=pytorch.Batch(AT + 1))
    assert steps_of(tmp_path) == [AT + 1]


def test_request_needs_no_signal(tmp_path: Path) -> None:
    handler = PreemptionHandler()
    with pytest.raises(errors.Preempted):
        train(tmp_path, trial_that(lambda context: handler.request()), callbacks=[handler])


def test_early_signal_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(errors.Preempted) as raised:
        train(tmp_path, callbacks=[SignalAtStart()])
    assert raised.value.code == errors.PREEMPTED_EXIT_CODE


@pytest.mark.slow
def test_early_signal_ends_two_ranks_as_preempted(tmp_path: Path) -> None:
    ended = wait(start(tmp_path, "--signal-at-start", launcher=[*LAUNCHER, "--"]))
    assert ended.status == errors.PREEMPTED_EXIT_CODE, ended.output
    assert steps_of(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": [signal.SIGINT]}, "SIGINT is Ctrl-C"),
        ({"signals": [signal.SIGKILL]}, "cannot take SIGKILL"),
        ({"exit_code": 0}, "from 1 to 255; got 0"),
    ],
)
def test_wrong_signals_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreemptionHandler(**arguments)


@pytest.mark.slow
def test_signal_to_the_group_keeps_the_code(tmp_path: Path) -> None:
    """Workers that load batches are in the group too; a second signal, after some time, ends the process at once."""
    group = start(tmp_path / "group", "--end", "sigterm-to-group", "--at", "6", "--workers", "2", is_warm=False)
    twice = start(tmp_path / "twice", "--end", "two-signals", "--at", "5")
    ended = wait(group)
    assert ended.status == 75, ended.output
    assert "received SIGTERM" in ended.output
    ended = wait(twice)
    assert ended.status == -signal.SIGTERM, ended.output
    assert "received a second signal" in ended.output
    assert steps_of(tmp_path / "twice" / "checkpoints") == []


def assert_ends(process: Any, status: int = 0) -> None:
    ended = wait(process)
    assert ended.status == status, ended.output


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind that were let alone, and two whose launcher got SIGUSR1 at batch 5."""
    folder = tmp_path_factory.mktemp("two_ranks")
    straight = start(folder / "straight", launcher=TORCHRUN, is_warm=False)
    arguments = ["--end", "sigusr1-to-launcher", "--at", "5", "--rank", "1"]
    preempted = start(folder / "preempted", *arguments, launcher=[*LAUNCHER, "--"], is_warm=False)
    assert_ends(straight)
    assert_ends(preempted, 75)
    return folder


@pytest.mark.slow
def test_two_ranks_save_together(ranks: Path) -> None:
    assert steps_of(ranks / "preempted" / "checkpoints") == [8]
    assert not list((ranks / "preempted").glob("end-*.pt"))


@pytest.mark.slow
def test_preempted_and_killed_ranks_resume(ranks: Path, tmp_path: Path) -> None:
    """They go on from batch 8; rank 1 is killed at batch 14; the launcher restarts both, from the checkpoint at 12."""
    shutil.copytree(ranks / "preempted" / "checkpoints", tmp_path / "checkpoints")
    arguments = ["--latest", "last", "--period", "--end", "sigkill", "--at", "14", "--rank", "1"]
    assert_ends(start(tmp_path, *arguments, launcher=[*LAUNCHER, "--max-restarts", "1", "--"]))
    for rank in range(2):
        assert end_of(tmp_path, rank)["first_batch"] == 12
        assert torch.equal(end_of(tmp_path, rank)["weights"], end_of(ranks / "straight")["weights"])


@pytest.mark.slow
def test_one_process_continues_two(ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(ranks / "preempted" / "checkpoints", tmp_path / "checkpoints")
    one = start(tmp_path, "--latest", "last")
    lightning = start(tmp_path / "lightning", "--trainer", "lightning", "--end", "sigterm", "--at", "5", "--rank", "0")
    assert_ends(one)
    assert end_of(tmp_path)["first_batch"] == 2 * 8
    # Meanwhile, under Lightning's own launcher: the process that was started by hand got the signal.
    assert_ends(lightning, 75)
    assert steps_of(tmp_path / "lightning" / "checkpoints") == [8]


def test_restart_takes_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path)  # an earlier job, complete, in the same storage
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr("det_lightning.pytorch._trainer._fits", iter([1, 1, 2]))
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, trial_that(lambda context: 1 / 0), checkpoint_period=pytorch.Batch(5))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path).context.get_initial_batch() == 5
    # The second fit of the script, which the first process had not come to.
    assert train(tmp_path).context.get_initial_batch() == 0


# What a script prints, and its status, when it ends before its time: Ctrl-C, and hyperparameters given up on


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


def fit(trial_class: type[SmallTrial], storage: Path, callbacks: Any = None, **arguments: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fit_trial(trial_class, callbacks, checkpoint_storage=storage, **{"max_length": pytorch.Batch(9), **arguments})
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_names_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(trial_that(send(signal.SIGINT), 3), tmp_path)
    assert not any(Path(pl.__file__).parent in Path(entry.path).parents for entry in raised.traceback)
    assert raised.value.__suppress_context__
    assert "Interrupted after 3 batches. Nothing was saved; " in caplog.text
    assert "PreemptionHandler(save_on_interrupt=True) saves on Ctrl-C." in caplog.text
    fit(SmallTrial, tmp_path)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    with pytest.raises(KeyboardInterrupt):
        fit(trial_that(send(signal.SIGINT), 12), tmp_path, latest_checkpoint=checkpoint, max_length=pytorch.Batch(15))
    path = str(tmp_path / checkpoint)
    assert f"Nothing was saved since {path}. To continue from there: fit(latest_checkpoint={path!r})." in caplog.text


@pytest.mark.parametrize("signals", [None, []])
def test_ctrl_c_saves_with_other_signals(
    signals: list[int] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(trial_that(send(signal.SIGINT), 3), tmp_path, callbacks=PreemptionHandler(signals, save_on_interrupt=True))
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    assert CheckpointStorage(tmp_path).info(checkpoint).metadata["steps_completed"] == 4
    assert f"Interrupted after 4 batches. Checkpoint {checkpoint} in" in caplog.text


def test_invalid_hp_can_be_caught(tmp_path: Path) -> None:
    class GivesUp(SmallTrial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            raise InvalidHP("too large")

    with pytorch.init(enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(GivesUp(context), context, enable_progress_bar=False)
        with pytest.raises(InvalidHP, match="too large"):
            trainer.fit(max_length=pytorch.Batch(9), checkpoint_storage=tmp_path)
