"""Callbacks: what they may change, what they keep, and when they are told of the end."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.sides import SIDES, Trace, assert_same, compare, run
from tests.conformance.trials import basic, make_data

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")


def with_callbacks(make_callbacks: Any, **methods: Any) -> Any:
    """Return the maker of a trial with the callbacks that ``make_callbacks(api, trial)`` gives."""

    def make(api: Any) -> type:
        def build_callbacks(self: Any) -> dict[str, Any]:
            return make_callbacks(api, self)

        return type("WithCallbacks", (basic(api),), {"build_callbacks": build_callbacks, **methods})

    return make


def callback(api: Any, **methods: Any) -> Any:
    return type("Callback", (api.PyTorchCallback,), methods)()


def test_metrics_that_a_callback_changes_are_reported_changed() -> None:
    def doubles(self: Any, metrics: dict[str, Any]) -> None:
        metrics["doubled"] = metrics["validation_loss"] * 2

    make = with_callbacks(lambda api, trial: {"first": callback(api, on_validation_end=doubles)})
    compare(make, max_length=lambda api: api.Batch(5), validation_period=lambda api: api.Batch(2))


def test_what_a_callback_adds_to_a_checkpoint_is_in_it() -> None:
    def adds(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = {"answer": 42}
        checkpoint["rng_state"]["mine"] = 1

    make = with_callbacks(lambda api, trial: {"adds": callback(api, on_checkpoint_save_start=adds)})
    trace = compare(make, max_length=lambda api: api.Batch(2))
    assert trace.checkpoints[-1]["keys"][-1] == "extra"


def test_files_that_a_callback_adds_are_in_the_directory() -> None:
    def adds(self: Any, checkpoint_dir: str) -> None:
        with open(f"{checkpoint_dir}/note.txt", "w") as file:  # noqa: PTH123 (as a trial would)
            file.write("note")

    make = with_callbacks(lambda api, trial: {"adds": callback(api, on_checkpoint_end=adds)})
    compare(make, max_length=lambda api: api.Batch(2))


def test_functions_that_were_given_to_a_callback_are_called() -> None:
    def make_callbacks(api: Any, trial: Any) -> dict[str, Any]:
        given = api.PyTorchCallback()
        given.on_checkpoint_write_end = lambda checkpoint_dir: (Path(checkpoint_dir) / "given").touch()
        given.on_validation_end = lambda metrics: metrics.update(given=1.0)
        given.on_checkpoint_save_start = lambda checkpoint: checkpoint.update(given=1)
        return {"given": given}

    trace = compare(
        # The recorder comes first, and would not see what later callbacks change.
        lambda api: type("Last", (with_callbacks(make_callbacks)(api),), {}),
        max_length=lambda api: api.Batch(5),
        validation_period=lambda api: api.Batch(2),
    )
    assert trace.checkpoints[-1]["keys"][-1] == "given"


@pytest.mark.filterwarnings("ignore")
def test_epoch_starts_in_their_old_form_without_an_argument() -> None:
    starts: list[str] = []

    def on_training_epoch_start(self: Any) -> None:
        starts.append("epoch")

    make = with_callbacks(lambda api, trial: {"old": callback(api, on_training_epoch_start=on_training_epoch_start)})
    compare(make, max_length=lambda api: api.Epoch(2))
    assert len(starts) == 4  # two on each side


class Noisy:
    """A batch that draws when it is moved."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.inputs, self.targets))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noisy) and all(map(torch.equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def to(self, device: Any, *_: Any, **__: Any) -> Noisy:
        return Noisy(self.inputs.to(device) + 0.1 * torch.randn_like(self.inputs), self.targets.to(device))


@pytest.mark.parametrize("periods", [{}, {"validation_period": lambda api: api.Batch(4)}])
def test_an_epoch_starts_before_its_first_batch_is_moved(periods: dict[str, Any]) -> None:
    def on_training_epoch_start(self: Any, epoch_idx: int) -> None:
        torch.randn(epoch_idx + 2)

    def make(api: Any) -> type:
        drawing = with_callbacks(
            lambda api, trial: {"draws": callback(api, on_training_epoch_start=on_training_epoch_start)}
        )

        class Moving(drawing(api)):  # type: ignore[misc]
            def build_training_data_loader(self) -> Any:
                def collate(samples: list[Any]) -> Noisy:
                    return Noisy(*(torch.stack(parts) for parts in zip(*samples, strict=True)))

                return api.DataLoader(make_data(), batch_size=4, collate_fn=collate)

            def get_batch_length(self, batch: Any) -> int:
                return len(next(iter(batch)))

        return Moving

    compare(make, max_length=lambda api: api.Epoch(2), **periods)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "hook",
    ["on_trial_startup", "on_training_start", "on_training_epoch_end", "on_validation_start", "on_validation_end"],
)
def test_an_exception_in_a_callback_ends_the_run_and_reaches_every_shutdown(
    hook: str, kind: type[BaseException]
) -> None:
    traces, handler = [], signal.getsignal(signal.SIGINT)
    for side in SIDES:
        ends: list[str] = []

        def fails(self: Any, *args: Any, **kwargs: Any) -> None:
            raise kind(hook)

        def make_callbacks(api: Any, trial: Any, ends: list[str] = ends, fails: Any = fails) -> dict[str, Any]:
            note = {name: callback(api, on_trial_shutdown=lambda self, name=name: ends.append(name)) for name in "ab"}
            return {**note, "fails": callback(api, **{hook: fails})}

        with pytest.raises(kind, match=hook):
            run(side, with_callbacks(make_callbacks), max_length=lambda api: api.Epoch(1))
        traces.append(ends)
    assert traces[0] == traces[1] == ["b", "a"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("batch_of_failure", [0, 1, 4])
@pytest.mark.parametrize("error", ["InvalidHP", "RuntimeError"])
def test_a_failing_trial_has_the_same_events(error: str, batch_of_failure: int) -> None:
    """InvalidHP saves what was trained, and ``init`` ends the process well; any other exception does not."""
    traces = []
    for side in SIDES:
        events: list[Trace] = []
        module = __import__(side)
        kind = module.InvalidHP if error == "InvalidHP" else RuntimeError

        def make(api: Any, events: list[Any] = events, kind: Any = kind) -> type:
            class Fails(basic(api)):  # type: ignore[misc]
                def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                    if batch_idx == batch_of_failure:
                        raise kind("no")
                    return super().train_batch(batch, epoch_idx, batch_idx)

                def build_callbacks(self) -> dict[str, Any]:
                    from tests.conformance.sides import recording_callback

                    events.append(Trace())
                    return {"second": recording_callback(api, events[-1])}

            return Fails

        with pytest.raises(SystemExit if error == "InvalidHP" else kind) as ended:
            run(side, make, max_length=lambda api: api.Batch(9), validation_period=lambda api: api.Batch(2))
        assert error != "InvalidHP" or ended.value.code == 0
        traces.append(events[-1])
    assert_same(*traces)


@pytest.mark.parametrize("draw", [lambda: torch.rand(3), lambda: np.random.rand(3)], ids=["torch", "numpy"])
@pytest.mark.parametrize("hook", ["on_training_start", "on_validation_start", "on_validation_end", "on_trial_startup"])
def test_random_draws_in_callbacks_fall_at_the_same_moments(hook: str, draw: Any) -> None:
    def make_callbacks(api: Any, trial: Any) -> dict[str, Any]:
        def draws(self: Any, *args: Any, **kwargs: Any) -> None:
            draw()

        return {"draws": callback(api, **{hook: draws})}

    compare(
        with_callbacks(make_callbacks), max_length=lambda api: api.Batch(9), validation_period=lambda api: api.Batch(4)
    )


@pytest.mark.parametrize("policy", ["all", "none"])
@pytest.mark.parametrize("hook", ["on_checkpoint_save_start", "on_checkpoint_write_end", "on_checkpoint_upload_end"])
def test_checkpoint_callbacks_run_with_gradients_on_except_after_a_validation(hook: str, policy: str) -> None:
    seen: list[list[bool]] = []

    def make_callbacks(api: Any, trial: Any) -> dict[str, Any]:
        seen.append(modes := [])
        return {"notes": callback(api, **{hook: lambda self, *args, **kwargs: modes.append(torch.is_grad_enabled())})}

    compare(
        with_callbacks(make_callbacks),
        max_length=lambda api: api.Batch(7),
        validation_period=lambda api: api.Batch(4),
        checkpoint_period=lambda api: api.Batch(2),
        checkpoint_policy=policy,
    )
    assert seen[0] == seen[1]
    assert seen[0] == [True, policy == "none", True, policy == "none"]


@pytest.mark.parametrize("hook", ["on_checkpoint_save_start", "on_checkpoint_write_end", "on_checkpoint_upload_end"])
@pytest.mark.parametrize("validation_period", [2, 5])
@pytest.mark.parametrize("policy", ["all", "none"])
def test_giving_up_on_the_hyperparameters_during_a_checkpoint_ends_the_run(
    hook: str, validation_period: int, policy: str
) -> None:
    def gives_up(side: str) -> Any:
        def fails(self: Any, *args: Any, **kwargs: Any) -> None:
            raise __import__(side).InvalidHP("no")

        return with_callbacks(lambda api, trial: {"fails": callback(api, **{hook: fails})})

    traces = [
        run(
            side,
            gives_up(side),
            max_length=lambda api: api.Batch(5),
            validation_period=lambda api: api.Batch(validation_period),
            checkpoint_period=lambda api: api.Batch(4),
            checkpoint_policy=policy,
        )
        for side in SIDES
    ]
    assert_same(*traces)


@pytest.mark.parametrize("on_instance", [False, True])
def test_a_trial_that_counts_its_records_counts_those_of_training_and_validation(on_instance: bool) -> None:
    counted: list[list[int]] = []

    def make_callbacks(api: Any, trial: Any) -> dict[str, Any]:
        counted.append(trial.counted)
        return {}

    def get_batch_length(self: Any, batch: Any) -> int:
        self.counted.append(len(batch[0]))
        return len(batch[0])

    def make(api: Any) -> type:
        counting = {} if on_instance else {"get_batch_length": get_batch_length}
        trial_class: type = with_callbacks(make_callbacks, **counting)(api)

        class Counting(trial_class):
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.counted: list[int] = []
                if on_instance:
                    self.get_batch_length = functools.partial(get_batch_length, self)

        return Counting

    compare(make, max_length=lambda api: api.Batch(7), validation_period=lambda api: api.Batch(4))
    assert counted[0] == counted[1]
    assert len(counted[0]) == 7 + 2 * 3


def test_the_profiler_steps_right_after_train_batch() -> None:
    """Before the callbacks of an epoch's end, and those of a workload's."""
    traces = []
    for side in SIDES:
        events: list[tuple[str, int]] = []

        def note(step: int, events: list[Any] = events) -> torch.profiler.ProfilerAction:
            events.append(("step", step))
            return torch.profiler.ProfilerAction.NONE

        def make(api: Any, events: list[Any] = events, note: Any = note) -> type:
            class Profiled(basic(api)):  # type: ignore[misc]
                def __init__(self, context: Any) -> None:
                    super().__init__(context)
                    context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU], schedule=note)

                def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                    events.append(("batch", batch_idx))
                    return super().train_batch(batch, epoch_idx, batch_idx)

                def build_callbacks(self) -> dict[str, Any]:
                    def epoch_ends(self: Any, epoch_idx: int) -> None:
                        events.append(("epoch", epoch_idx))

                    def workload_ends(self: Any, avg_metrics: Any, batch_metrics: Any) -> None:
                        events.append(("workload", avg_metrics["batches"]))

                    hooks = {"on_training_epoch_end": epoch_ends, "on_training_workload_end": workload_ends}
                    return {"notes": callback(api, **hooks)}

            return Profiled

        run(side, make, max_length=lambda api: api.Epoch(2), reporting_period=lambda api: api.Batch(3))
        traces.append(events)
    assert traces[0] == traces[1]
    ends = [index for index, (name, _) in enumerate(traces[1]) if name == "epoch"]
    assert len(ends) == 2
    assert all(traces[1][index - 1][0] == "step" for index in ends)
