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
from tests.conformance.trials import Basic, Training, built, calling


def returning(metrics_of: Any) -> type[Basic]:
    """Return a trial whose batches have the metrics that ``metrics_of(loss, batch_idx)`` gives."""

    class Returning(Basic):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return metrics_of(super().train_batch(batch, epoch_idx, batch_idx)["loss"], batch_idx)

    return Returning


# With NumPy 1 Determined fails on the mean of larger integers than int64 holds.
HUGE = 2**70 if int(np.__version__.partition(".")[0]) > 1 else 2**40


@pytest.mark.parametrize(
    "metrics_of",
    [
        lambda loss, i: loss,
        lambda loss, i: (
            {"loss": loss.item(), "count": i, "half": loss.double() / 2, "complex": complex(i, 1), "flag": i % 2 == 0}
            | {"f32": np.float32(i) / 3, "f64": np.float64(i) / 3, "int": np.int64(i)}
            | {"vector": torch.stack([loss, loss]), "matrix": np.ones((2, 2)) * i}
        ),
        lambda loss, i: (
            {"text": "abc", "list": [i, i + 1], "none": None, "sometimes": None if i % 2 else float(i), "bytes": b"x"}
            | {"ragged": [1] * (i % 3 + 1), "nan": float("nan"), "big": 2**40 + i, "nested": {"a": {"b": loss.item()}}}
            | {"took": np.timedelta64(i, "s"), "huge": HUGE + i}
        ),
        lambda loss, i: {"batches": 7, "epochs": 0.5, "loss": loss},
        lambda loss, i: {},
        lambda loss, i: {1: loss, ("a", 2): float(i)},
        lambda loss, i: {"epoch": float(i), "step": float(i), "lr": 0.5, "hp_metric": loss, "val_x": 1.0, "a/b c": 2.0},
    ],
    ids=["tensor", "numbers", "odd", "own batches", "empty", "names that are no text", "names that Lightning uses"],
)
def test_training_metrics_are_reported_the_same(metrics_of: Any) -> None:
    compare(returning(metrics_of), max_length=9, reporting_period=4)


def test_metrics_in_any_mapping_are_averaged_the_same() -> None:
    trial = returning(lambda loss, i: collections.UserDict(loss=loss, index=float(i)))
    real, ours = (run(side, trial, max_length=3) for side in SIDES)
    ((_, averages, _),) = ours.named("on_training_workload_end")
    assert averages == real.named("on_training_workload_end")[0][1]
    assert ours.final == real.final


def plain(loss: Any, i: int) -> Any:
    return {"a": loss, "i": i, "v": np.arange(3.0) + i}


def odd(loss: Any, i: int) -> Any:
    of_batch = {"took": np.timedelta64(i, "s"), "b": i % 2 == 0, 1: loss}
    return {**of_batch, "nan": float("nan") if i else 1.0, "huge": 2**70 + i}


MATRIX = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("metrics_of", "reducer"),
    [
        *((plain, name) for name in ("AVG", "SUM", "MAX", "MIN")),
        *((odd, name) for name in ("SUM", "MAX")),
        (lambda loss, i: {"transposed": MATRIX.t() * (i + 1)}, "AVG"),  # to be averaged in the order of its memory
        (lambda loss, i: {"l": loss, "f": 0.1 * i, "d": loss.double()}, "AVG"),
        (lambda loss, i: {"l": loss, "f": 0.1 * i, "d": loss.double(), "batches": 3}, "AVG"),
        (lambda loss, i: {"a": loss, "b": i}, {"b": "SUM", "a": "MAX"}),
    ],
)
def test_validation_metrics_are_reduced_the_same(metrics_of: Any, reducer: Any) -> None:
    class Evaluating(Basic):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
            return metrics_of(self.loss(batch), batch_idx)

        def evaluation_reducer(self) -> Any:
            ways = self.api.Reducer
            return ways[reducer] if isinstance(reducer, str) else {name: ways[way] for name, way in reducer.items()}

    compare(Evaluating, max_length=2)


def _keyword_with_default(self: Any, batch: Any, *, batch_idx: int = 99) -> dict[str, Any]:
    return {"index": batch_idx}


def _index(self: Any, batch: Any, batch_idx: int) -> Any:
    return {"index": batch_idx}


def _index_with_default(self: Any, batch: Any, batch_idx: int = 5) -> Any:
    return {"index": batch_idx}


@pytest.mark.parametrize(
    "method",
    [
        _keyword_with_default,
        functools.wraps(_index_with_default)(lambda *args, **kwargs: _index_with_default(*args, **kwargs)),
        torch.no_grad()(_index_with_default),
        staticmethod(lambda batch, index=5: {"index": index}),
        functools.wraps(_index)(lambda self, batch: _index(self, batch, 7)),
        _index_with_default,
        lambda self, batch, *args: {"index": len(args)},
        lambda self, batch_idx, batch: {"index": batch_idx},
    ],
    ids=[
        *("by name only", "default behind a decorator", "default behind no_grad", "default of a static method"),
        *("behind a decorator", "with a default", "of any number", "in another order"),
    ],
)
def test_the_index_goes_to_those_who_take_it(method: Any) -> None:
    compare(type("Takes", (Basic,), {"evaluate_batch": method}), max_length=2)


def test_evaluation_may_be_assigned_to_the_trial() -> None:
    def give(trial: Any) -> None:
        trial.evaluate_batch = lambda batch: {"loss": trial.loss(batch)}

    compare(built(give, Training), max_length=2)


def test_cleared_metrics_are_not_reduced() -> None:
    compare(calling(on_validation_epoch_end=lambda outputs: outputs.clear()), max_length=2)


def test_full_dataset_is_evaluated_the_same() -> None:
    class Full(Training):
        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            losses = [self.loss(batch) for batch in data_loader]
            total = torch.stack(losses).sum()
            return {"total": total, "count": len(losses), "complex": torch.complex(total, total), 3: "text"}

    compare(Full, max_length=7, validation_period=3)


@pytest.mark.parametrize("old_spelling", [False, True])
def test_custom_reducers_reduce_the_same(old_spelling: bool) -> None:
    """``context.experimental.wrap_reducer`` is the spelling of 0.13; Determined 0.38 has only the other one."""

    class Reducing(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)

            class Collect(self.api.MetricReducer):  # type: ignore[name-defined]
                def __init__(self, name: str) -> None:
                    self.name = name

                def reset(self) -> None:
                    self.total = 0.0

                def update(self, value: float) -> None:
                    self.total += value

                def per_slot_reduce(self) -> float:
                    return self.total

                def cross_slot_reduce(self, per_slot_metrics: Any) -> Any:
                    return {f"total {self.name}": sum(per_slot_metrics), f"slots {self.name}": len(per_slot_metrics)}

            ours = context.__class__.__module__.startswith("det_lightning")
            wrap = context.experimental.wrap_reducer if old_spelling and ours else context.wrap_reducer
            self.reducers = []
            for name in ("everywhere", "for_training", "for_validation"):
                scope = {} if name == "everywhere" else {name: False}
                several = lambda values, name=name: {f"count {name}": len(values), f"tensor {name}": torch.tensor(1.5)}  # noqa: E731
                self.reducers += [
                    wrap(lambda values: float(np.sum(values)), name=f"sum {name}", **scope),
                    wrap(several, **scope),
                    wrap(Collect(name), **scope),
                ]

        def loss(self, batch: Any) -> torch.Tensor:
            for reducer in self.reducers:
                reducer.update(float(batch[0].sum()))
            return super().loss(batch)

    compare(Reducing, max_length=9, validation_period=4)


def test_one_function_may_reduce_two_metrics() -> None:
    class Twice(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.reducers = [context.wrap_reducer(np.mean, name=name) for name in ("a", "b")]

        def loss(self, batch: Any) -> torch.Tensor:
            for factor, reducer in enumerate(self.reducers):
                reducer.update(float(batch[0].sum()) * factor)
            return super().loss(batch)

    compare(Twice, max_length=5)


def test_a_changing_tensor_keeps_its_value() -> None:
    """Knowingly different: on the CPU the real one's metrics share memory with the trial's tensors."""
    seen = {}
    for side in SIDES:
        total = torch.zeros(())
        trace = run(side, returning(lambda loss, i, total=total: {"seen": total.add_(1)}), max_length=3)
        ((_, averages, batches),) = trace.named("on_training_workload_end")
        seen[side] = float.fromhex(averages["seen"][1])
    assert [float(np.frombuffer(bytes.fromhex(batch["seen"][3]), "f4")[0]) for batch in batches[1:]] == [1, 2, 3]
    assert seen == {"determined": 3.0, "det_lightning": 2.0}


def test_dict_of_all_batches_keeps_each_value() -> None:
    """Knowingly different: every batch of the real one has the metrics of the last."""
    metrics: dict[str, Any] = {}

    def reuse(loss: Any, batch_idx: int) -> dict[str, Any]:
        metrics.update(loss=loss, batch=batch_idx)
        return metrics

    real, ours = (run(side, returning(reuse), max_length=3) for side in SIDES)
    means = [float.fromhex(trace.named("on_training_workload_end")[0][1]["batch"][1]) for trace in (real, ours)]
    assert means == [2.0, 1.0]


def test_kept_metrics_are_arrays() -> None:
    class Keeping(Basic):
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

    compare(Keeping, max_length=6, validation_period=3)


def test_tensorboard_files_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}
    trial = returning(lambda loss, i: {"loss": loss, "text": "no number", "val": float(i)})
    for side in SIDES:
        directory = Path(f"of_{side}").resolve()
        directory.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(directory)
            run(side, trial, init={"enable_tensorboard_logging": True}, max_length=9, validation_period=4)
            # Else the real one would not write the last values, at a path from the working directory.
            for writer in [one for one in gc.get_objects() if type(one) is SummaryWriter]:
                writer.close()
        written[side] = {}
        for folder in {path.parent for path in directory.glob("runs/**/*tfevents*")}:
            events = EventAccumulator(str(folder))
            events.Reload()
            for tag in events.Tags()["scalars"]:
                written[side][tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    assert written["det_lightning"] == written["determined"]
    assert {"Determined/loss", "Determined/val", "Determined/validation_loss"} == set(written["determined"])
