"""Callbacks: what they may change, what they keep, and when they are told of the end."""

from __future__ import annotations

import functools
import importlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.sides import SIDES, Trace, assert_same, compare, epoch, recording_callback, run
from tests.conformance.trials import Basic, built, callback, calling, changed, make_data

CHECKPOINT_HOOKS = ["on_checkpoint_save_start", "on_checkpoint_write_end", "on_checkpoint_upload_end"]


def invalid_hp(api: Any) -> Exception:
    """Return the exception of a side."""
    return importlib.import_module(api.__name__.partition(".")[0]).InvalidHP("no")


def test_what_callbacks_add_is_reported_and_saved() -> None:
    def doubles(metrics: dict[str, Any]) -> None:
        metrics["doubled"] = metrics["validation_loss"] * 2

    def adds(checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = {"answer": 42}
        checkpoint["rng_state"]["mine"] = 1

    def adds_file(checkpoint_dir: str) -> None:
        with open(f"{checkpoint_dir}/note.txt", "w") as file:  # noqa: PTH123 (as a trial would)
            file.write("note")

    in_checkpoint = {"on_checkpoint_save_start": adds, "on_checkpoint_end": adds_file}
    trace = compare(calling(Basic, on_validation_end=doubles, **in_checkpoint), max_length=5, validation_period=2)
    assert trace.checkpoints[-1]["keys"][-1] == "extra"


def test_functions_given_to_an_object_are_called() -> None:
    class Giving(Basic):
        def build_callbacks(self) -> dict[str, Any]:
            given = self.api.PyTorchCallback()
            given.on_checkpoint_write_end = lambda checkpoint_dir: (Path(checkpoint_dir) / "given").touch()
            given.on_validation_end = lambda metrics: metrics.update(given=1.0)
            given.on_checkpoint_save_start = lambda checkpoint: checkpoint.update(given=1)
            return {"given": given}

    trace = compare(Giving, max_length=5, validation_period=2)
    assert trace.checkpoints[-1]["keys"][-1] == "given"


@pytest.mark.filterwarnings("ignore")
def test_epoch_starts_may_take_no_argument() -> None:
    starts: list[str] = []
    compare(calling(on_training_epoch_start=lambda: starts.append("epoch")), max_length=epoch(2))
    assert len(starts) == 4  # two on each side


class Noisy:
    """A batch that draws when it is moved."""

    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noisy) and all(map(torch.equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def to(self, device: Any, *_: Any, **__: Any) -> Noisy:
        inputs, targets = self.parts
        return Noisy(inputs.to(device) + 0.1 * torch.randn_like(inputs), targets.to(device))


@pytest.mark.parametrize("periods", [{}, {"validation_period": 4}])
def test_epoch_starts_before_its_batch_is_moved(periods: dict[str, Any]) -> None:
    def collate(samples: list[Any]) -> Noisy:
        return Noisy(*(torch.stack(parts) for parts in zip(*samples, strict=True)))

    moving = changed(
        build_training_data_loader=lambda self: self.api.DataLoader(make_data(), batch_size=4, collate_fn=collate),
        get_batch_length=lambda self, batch: len(next(iter(batch))),
    )
    draws = calling(moving, on_training_epoch_start=lambda epoch_idx: torch.randn(epoch_idx + 2))
    compare(draws, max_length=epoch(2), **periods)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "hook",
    ["on_trial_startup", "on_training_start", "on_training_epoch_end", "on_validation_start", "on_validation_end"],
)
def test_an_exception_reaches_every_shutdown(hook: str, kind: type[BaseException]) -> None:
    ends: list[str] = []
    handler = signal.getsignal(signal.SIGINT)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise kind(hook)

    class Failing(Basic):
        def build_callbacks(self) -> dict[str, Any]:
            first, second = ({"on_trial_shutdown": functools.partial(ends.append, name)} for name in "ab")
            return {str(own): callback(self.api, **own) for own in (first, second, {hook: fails})}

    for side in SIDES:
        with pytest.raises(kind, match=hook):
            run(side, Failing, max_length=epoch(1))
    assert ends == ["b", "a", "b", "a"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("batch_of_failure", [0, 1, 4])
@pytest.mark.parametrize("error", ["InvalidHP", "RuntimeError"])
def test_a_failing_trial_has_the_same_events(error: str, batch_of_failure: int) -> None:
    """InvalidHP saves what was trained, and ``init`` ends the process well; any other exception does not."""
    traces: list[Trace] = []

    class Fails(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == batch_of_failure:
                raise invalid_hp(self.api) if error == "InvalidHP" else RuntimeError("no")
            return super().train_batch(batch, epoch_idx, batch_idx)

        def build_callbacks(self) -> dict[str, Any]:
            traces.append(Trace())
            return {"second": recording_callback(self.api, traces[-1])}

    for side in SIDES:
        ended: Any
        with pytest.raises(SystemExit if error == "InvalidHP" else RuntimeError) as ended:
            run(side, Fails, max_length=9, validation_period=2)
        assert error != "InvalidHP" or ended.value.code == 0
    assert_same(*traces)


@pytest.mark.parametrize("draw", [lambda: torch.rand(3), lambda: np.random.rand(3)], ids=["torch", "numpy"])
@pytest.mark.parametrize("hook", ["on_training_start", "on_validation_start", "on_validation_end", "on_trial_startup"])
def test_random_draws_fall_at_the_same_moments(hook: str, draw: Any) -> None:
    def draws(*args: Any, **kwargs: Any) -> None:
        draw()

    compare(calling(Basic, **{hook: draws}), max_length=9, validation_period=4)


@pytest.mark.parametrize("policy", ["all", "none"])
def test_gradients_are_off_after_a_validation(policy: str) -> None:
    seen: list[bool] = []

    def notes(*args: Any, **kwargs: Any) -> None:
        seen.append(torch.is_grad_enabled())

    hooks = dict.fromkeys(CHECKPOINT_HOOKS, notes)
    compare(calling(Basic, **hooks), max_length=7, validation_period=4, checkpoint_period=2, checkpoint_policy=policy)
    once = [enabled for enabled in (True, policy == "none", True, policy == "none") for _ in hooks]
    assert seen == once + once


@pytest.mark.parametrize("hook", CHECKPOINT_HOOKS)
@pytest.mark.parametrize("validation_period", [2, 5])
@pytest.mark.parametrize("policy", ["all", "none"])
def test_giving_up_in_a_checkpoint_ends_the_run(hook: str, validation_period: int, policy: str) -> None:
    class GivesUp(Basic):
        def build_callbacks(self) -> dict[str, Any]:
            def fails(*args: Any, **kwargs: Any) -> None:
                raise invalid_hp(self.api)

            return {"fails": callback(self.api, **{hook: fails})}

    compare(GivesUp, max_length=5, validation_period=validation_period, checkpoint_period=4, checkpoint_policy=policy)


@pytest.mark.parametrize("on_instance", [False, True])
def test_all_records_are_counted(on_instance: bool) -> None:
    counted: list[int] = []

    def get_batch_length(batch: Any) -> int:
        counted.append(len(batch[0]))
        return len(batch[0])

    def give(trial: Any) -> None:
        trial.get_batch_length = get_batch_length

    counting = built(give) if on_instance else changed(get_batch_length=staticmethod(get_batch_length))
    compare(counting, max_length=7, validation_period=4)
    half = 7 + 2 * 3
    assert counted[:half] == counted[half:]
    assert len(counted) == 2 * half


def test_profiler_steps_right_after_train_batch() -> None:
    """Before the callbacks of an epoch's end, and those of a workload's."""
    events: list[tuple[str, int]] = []

    def note(step: int) -> torch.profiler.ProfilerAction:
        events.append(("step", step))
        return torch.profiler.ProfilerAction.NONE

    class Profiled(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU], schedule=note)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            events.append(("batch", batch_idx))
            return super().train_batch(batch, epoch_idx, batch_idx)

    profiled = calling(
        Profiled,
        on_training_epoch_end=lambda epoch_idx: events.append(("epoch", epoch_idx)),
        on_training_workload_end=lambda avg_metrics, batch_metrics: events.append(("workload", avg_metrics["batches"])),
    )
    compare(profiled, max_length=epoch(2), reporting_period=3)
    real, ours = events[: len(events) // 2], events[len(events) // 2 :]
    assert ours == real
    assert [ours[index - 1][0] for index, (name, _) in enumerate(ours) if name == "epoch"] == ["step"] * 2
