"""What is reported: per batch, averaged, validated, reduced, and written for TensorBoard."""

from __future__ import annotations

import collections
import functools
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.conformance.sides import SIDES, compare, run
from tests.conformance.trials import basic

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")


def returning(metrics_of: Any) -> Any:
    """Return the maker of a trial whose batches have the metrics that ``metrics_of(loss, batch_idx)`` gives."""

    def make(api: Any) -> type:
        class Returning(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"]
                return metrics_of(loss, batch_idx)

        return Returning

    return make


# With NumPy 1 Determined fails on the mean of larger integers than int64 holds.
HUGE = 2**70 if int(np.__version__.partition(".")[0]) > 1 else 2**40


@pytest.mark.parametrize(
    "metrics_of",
    [
        lambda loss, i: loss,
        lambda loss, i: {"loss": loss.item(), "count": i, "half": loss.double() / 2},
        lambda loss, i: {"f32": np.float32(i) / 3, "f64": np.float64(i) / 3, "int": np.int64(i), "flag": i % 2 == 0},
        lambda loss, i: {"vector": torch.stack([loss, loss]), "matrix": np.ones((2, 2)) * i},
        lambda loss, i: {"text": "abc", "list": [i, i + 1], "none": None},
        lambda loss, i: {"sometimes": None if i % 2 else float(i), "loss": loss},
        lambda loss, i: {"batches": 7, "epochs": 0.5, "loss": loss},
        lambda loss, i: {"ragged": [1] * (i % 3 + 1), "nan": float("nan"), "big": 2**40 + i},
        lambda loss, i: {},
        lambda loss, i: {"took": np.timedelta64(i, "s"), "huge": HUGE + i},
        lambda loss, i: {1: loss, ("a", 2): float(i)},
        lambda loss, i: {"nested": {"a": {"b": loss.item()}}, "complex": complex(i, 1), "bytes": b"x"},
        lambda loss, i: {"epoch": float(i), "step": float(i), "lr": 0.5, "hp_metric": loss, "val_x": 1.0, "a/b c": 2.0},
    ],
    ids=[
        *("tensor", "scalars", "numpy", "arrays", "objects", "some None", "own batches", "odd", "empty"),
        *("odd numbers", "names that are no text", "nested", "names that Lightning uses"),
    ],
)
def test_kinds_of_training_metrics(metrics_of: Any) -> None:
    compare(returning(metrics_of), max_length=lambda api: api.Batch(9), reporting_period=lambda api: api.Batch(4))


def test_metrics_in_a_mapping_that_is_no_dict() -> None:
    make = returning(lambda loss, i: collections.UserDict(loss=loss, index=float(i)))
    real, ours = (run(side, make, max_length=lambda api: api.Batch(3)) for side in SIDES)
    ((_, averages, _),) = ours.named("on_training_workload_end")
    assert averages == real.named("on_training_workload_end")[0][1]
    assert ours.final == real.final


def evaluating(metrics_of: Any, reducer: Any = None) -> Any:
    def make(api: Any) -> type:
        class Evaluating(basic(api)):  # type: ignore[misc]
            def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
                return metrics_of(self.loss(batch), batch_idx)

            def evaluation_reducer(self) -> Any:
                return api.Reducer.AVG if reducer is None else reducer(api.Reducer)

        return Evaluating

    return make


def test_a_matrix_that_is_transposed_is_averaged_in_the_same_order() -> None:
    matrix = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    compare(evaluating(lambda loss, i: {"matrix": matrix.t() * (i + 1)}), max_length=_two)


@pytest.mark.parametrize("name", ["AVG", "SUM", "MAX", "MIN"])
def test_each_reducer(name: str) -> None:
    make = evaluating(lambda loss, i: {"a": loss, "i": i, "v": np.arange(3.0) + i}, lambda reducer: reducer[name])
    compare(make, max_length=lambda api: api.Batch(2))


@pytest.mark.parametrize("name", ["SUM", "MAX"])
@pytest.mark.parametrize(
    "metrics_of",
    [
        lambda loss, i: {"took": np.timedelta64(i, "s")},
        lambda loss, i: {1: loss, "b": i % 2 == 0},
        lambda loss, i: {"nan": float("nan") if i else 1.0, "huge": 2**70 + i},
    ],
    ids=["durations", "names that are no text", "odd numbers"],
)
def test_odd_validation_metrics(metrics_of: Any, name: str) -> None:
    compare(evaluating(metrics_of, lambda reducer: reducer[name]), max_length=lambda api: api.Batch(2))


def _keyword_with_default(self: Any, batch: Any, *, batch_idx: int = 99) -> dict[str, Any]:
    return {"index": batch_idx}


def _one_argument(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, batch: Any) -> Any:
        return method(self, batch, 7)

    return wrapper


def _any_arguments(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "method",
    [
        _keyword_with_default,
        _any_arguments(lambda self, batch, batch_idx=5: {"index": batch_idx}),
        torch.no_grad()(lambda self, batch, batch_idx=5: {"index": batch_idx}),
        staticmethod(lambda batch, index=5: {"index": index}),
        _one_argument(lambda self, batch, batch_idx: {"index": batch_idx}),
        lambda self, batch, batch_idx=5: {"index": batch_idx},
        lambda self, batch, *args: {"index": len(args)},
        lambda self, batch_idx, batch: {"index": batch_idx},
    ],
    ids=[
        *("by name only", "default behind a decorator", "default behind no_grad", "default of a static method"),
        *("behind a decorator", "with a default", "of any number", "in another order"),
    ],
)
def test_the_index_goes_to_those_who_take_it(method: Any) -> None:
    make = lambda api: type("Takes", (basic(api),), {"evaluate_batch": method})  # noqa: E731
    compare(make, max_length=lambda api: api.Batch(2))


def test_an_evaluation_that_was_given_to_the_trial() -> None:
    def make(api: Any) -> type:
        class Given(basic(api)):  # type: ignore[misc]
            evaluate_batch = api.PyTorchTrial.evaluate_batch

            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.evaluate_batch = lambda batch: {"loss": self.loss(batch)}

        return Given

    compare(make, max_length=lambda api: api.Batch(2))


def test_metrics_that_a_callback_clears_are_not_reduced() -> None:
    def make(api: Any) -> type:
        def build_callbacks(self: Any) -> dict[str, Any]:
            clears = {"on_validation_epoch_end": lambda callback, outputs: outputs.clear()}
            return {"clears": type("Clears", (api.PyTorchCallback,), clears)()}

        return type("Cleared", (basic(api),), {"build_callbacks": build_callbacks})

    compare(make, max_length=lambda api: api.Batch(2))


def test_a_reducer_for_each_metric() -> None:
    make = evaluating(lambda loss, i: {"a": loss, "b": i}, lambda reducer: {"b": reducer.SUM, "a": reducer.MAX})
    compare(make, max_length=lambda api: api.Batch(2))


@pytest.mark.parametrize("own", [{}, {"batches": 3}], ids=str)
def test_kinds_of_validation_metrics(own: dict[str, Any]) -> None:
    compare(evaluating(lambda loss, i: {"l": loss, "f": 0.1 * i, "d": loss.double(), **own}), max_length=_two)


def _two(api: Any) -> Any:
    return api.Batch(2)


def test_the_full_dataset() -> None:
    def make(api: Any) -> type:
        class Full(basic(api)):  # type: ignore[misc]
            evaluate_batch = api.PyTorchTrial.evaluate_batch

            def evaluate_full_dataset(self, data_loader: Any) -> Any:
                losses = [self.loss(batch) for batch in data_loader]
                total = torch.stack(losses).sum()
                return {"total": total, "count": len(losses), "complex": torch.complex(total, total), 3: "text"}

        return Full

    compare(make, max_length=lambda api: api.Batch(7), validation_period=lambda api: api.Batch(3))


@pytest.mark.parametrize("old_spelling", [False, True])
@pytest.mark.parametrize("scope", [{}, {"for_training": False}, {"for_validation": False}], ids=str)
def test_custom_reducers(scope: dict[str, bool], old_spelling: bool) -> None:
    """``context.experimental.wrap_reducer`` is the spelling of 0.13; Determined 0.38 has only the other one."""

    def make(api: Any) -> type:
        class Collect(api.MetricReducer):
            def reset(self) -> None:
                self.total = 0.0

            def update(self, value: float) -> None:
                self.total += value

            def per_slot_reduce(self) -> float:
                return self.total

            def cross_slot_reduce(self, per_slot_metrics: Any) -> Any:
                return {"total": sum(per_slot_metrics), "slots": len(per_slot_metrics)}

        class Reducing(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                ours = context.__class__.__module__.startswith("det_lightning")
                wrap = context.experimental.wrap_reducer if old_spelling and ours else context.wrap_reducer
                self.function = wrap(lambda values: float(np.sum(values)), name="sum", **scope)
                self.several = wrap(lambda values: {"count": len(values), "as_tensor": torch.tensor(1.5)}, **scope)
                self.collect = wrap(Collect(), **scope)

            def loss(self, batch: Any) -> torch.Tensor:
                for reducer in (self.function, self.several, self.collect):
                    reducer.update(float(batch[0].sum()))
                return super().loss(batch)

        return Reducing

    compare(make, max_length=lambda api: api.Batch(9), validation_period=lambda api: api.Batch(4))


def test_one_function_for_two_metrics() -> None:
    def make(api: Any) -> type:
        class Twice(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.reducers = [context.wrap_reducer(np.mean, name=name) for name in ("a", "b")]

            def loss(self, batch: Any) -> torch.Tensor:
                for factor, reducer in enumerate(self.reducers):
                    reducer.update(float(batch[0].sum()) * factor)
                return super().loss(batch)

        return Twice

    compare(make, max_length=lambda api: api.Batch(5))


def test_a_tensor_that_the_trial_goes_on_changing_keeps_its_value() -> None:
    """Knowingly different: on the CPU the real one's metrics share memory with the trial's tensors."""

    def make(api: Any) -> type:
        class Running(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.seen = torch.zeros(())

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                super().train_batch(batch, epoch_idx, batch_idx)
                return {"seen": self.seen.add_(1)}

        return Running

    real, ours = (run(side, make, max_length=lambda api: api.Batch(3)) for side in SIDES)
    (_, averages, batches), (_, real_averages, _) = (
        trace.named("on_training_workload_end")[0] for trace in (ours, real)
    )
    assert [float(np.frombuffer(bytes.fromhex(b["seen"][3]), "f4")[0]) for b in batches[1:]] == [1, 2, 3]
    assert (float.fromhex(averages["seen"][1]), float.fromhex(real_averages["seen"][1])) == (2.0, 3.0)


def test_a_dict_that_the_trial_returns_for_every_batch_keeps_the_values_of_each() -> None:
    """Knowingly different: every batch of the real one has the metrics of the last."""

    def make(api: Any) -> type:
        metrics: dict[str, Any] = {}

        class Reusing(basic(api)):  # type: ignore[misc]
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                metrics.update(super().train_batch(batch, epoch_idx, batch_idx), batch=batch_idx)
                return metrics

        return Reusing

    real, ours = (run(side, make, max_length=lambda api: api.Batch(3)) for side in SIDES)
    means = [float.fromhex(trace.named("on_training_workload_end")[0][1]["batch"][1]) for trace in (real, ours)]
    assert means == [2.0, 1.0]


def test_what_a_trial_keeps_of_its_metrics_is_arrays() -> None:
    def make(api: Any) -> type:
        class Keeping(basic(api)):  # type: ignore[misc]
            def __init__(self, context: Any) -> None:
                super().__init__(context)
                self.kept: list[dict[str, Any]] = []

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                so_far = float(np.mean([metrics["loss"] for metrics in self.kept])) if self.kept else 0.0
                self.kept.append({**super().train_batch(batch, epoch_idx, batch_idx), "pair": torch.ones(2)})
                kinds = {type(value).__name__ for metrics in self.kept[:-1] for value in metrics.values()}
                self.kept[-1].update(so_far=so_far, kinds=sorted(kinds))
                return self.kept[-1]

            def evaluate_batch(self, batch: Any) -> Any:
                self.kept.append({"loss": self.loss(batch)})
                return self.kept[-1]

        return Keeping

    compare(make, max_length=lambda api: api.Batch(6), validation_period=lambda api: api.Batch(3))


def close_summary_writers() -> None:
    """Let what is still to be written arrive, at a path from the working directory; the real one does not close."""
    for writer in gc.get_objects():
        if type(writer) is SummaryWriter:
            writer.close()


def test_tensorboard_files(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}
    make = returning(lambda loss, i: {"loss": loss, "text": "no number", "val": float(i)})
    for side in SIDES:
        directory = Path(f"of_{side}").resolve()
        directory.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(directory)
            run(
                side,
                make,
                init={"enable_tensorboard_logging": True},
                max_length=lambda api: api.Batch(9),
                validation_period=lambda api: api.Batch(4),
            )
            close_summary_writers()
        written[side] = {}
        for folder in {path.parent for path in directory.glob("runs/**/*tfevents*")}:
            events = EventAccumulator(str(folder))
            events.Reload()
            for tag in events.Tags()["scalars"]:
                written[side][tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    assert written["det_lightning"] == written["determined"]
    assert {"Determined/loss", "Determined/val", "Determined/validation_loss"} == set(written["determined"])
