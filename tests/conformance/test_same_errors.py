"""What Determined refuses is refused, with the same kind of error, and with the culprit named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.conformance.sides import raises_alike
from tests.conformance.trials import Basic, built, changed, make_data, schedule

EMPTY = torch.utils.data.Subset(make_data(), [])


def wrap_reducer_twice(trial: Any) -> None:
    class Own(trial.api.MetricReducer):
        reset = per_slot_reduce = cross_slot_reduce = lambda self, *args: None

    own = Own()
    for name in ("one", "two"):
        trial.context.wrap_reducer(own, name=name)


def wrap_wrapped_reducer(trial: Any) -> None:
    trial.context.wrap_reducer(trial.context.wrap_reducer(len, name="one"), name="two")


#: By the mistake in a trial's ``__init__``, what does it there, and what the message says.
WRONG_IN_INIT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no model": (lambda trial: trial.context.models.clear(), "no wrapped model"),
    "no optimizer": (lambda trial: trial.context.optimizers.clear(), "no wrapped optimizer"),
    "scheduler that needs a metric": (
        lambda trial: schedule(trial, ReduceLROnPlateau(trial.optimizer), "STEP_EVERY_BATCH"),
        "ReduceLROnPlateau was wrapped with step_mode",
    ),
    "scheduler of an unwrapped optimizer": (
        lambda trial: schedule(trial, StepLR(SGD(trial.model.parameters(), 1.0), 1)),
        r"StepLR got an optimizer \(SGD\)",
    ),
    "step mode that is a text": (
        lambda trial: trial.context.wrap_lr_scheduler(StepLR(trial.optimizer, 1), "every batch"),
        "step_mode must be .*'every batch'",
    ),
    "reducer that is a number": (
        lambda trial: trial.context.wrap_reducer(3, name="three"),
        r"got 3 of type int \(name='three'\)",
    ),
    "reducer wrapped twice": (wrap_reducer_twice, r"same Own object a second time \(name='two'\)"),
    "wrapped reducer wrapped again": (
        wrap_wrapped_reducer,
        r"same FunctionReducer object a second time \(name='two'\)",
    ),
    "scaler after the model": (
        lambda trial: trial.context.wrap_scaler(torch.amp.GradScaler("cpu")),
        "before the first wrap_model",
    ),
    "stop request that is a text": (lambda trial: trial.context.set_stop_requested("yes"), "takes a bool; got 'yes'"),
    "hyperparameter of a run without any": (lambda trial: trial.context.get_hparam("lr"), "has no hparams"),
    "configuration of a run without one": (
        lambda trial: trial.context.get_experiment_config(),
        "no experiment configuration",
    ),
    "batch size of a run without one": (lambda trial: trial.context.get_global_batch_size(), "batch size is unknown"),
    "batch before training": (lambda trial: trial.context.current_train_batch(), "training has not started"),
    "seed of a run without one": (lambda trial: trial.context.get_trial_seed(), "no seed"),
    "no backward pass per step": (
        lambda trial: trial.context.wrap_optimizer(SGD(trial.model.parameters(), 1.0), backward_passes_per_step=0),
        "backward_passes_per_step.*got 0",
    ),
}

#: By the mistake in a trial's methods, the methods, and what the message says.
WRONG_METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "both evaluations": (
        {"evaluate_full_dataset": lambda self, data_loader: {}},
        "evaluate_batch and evaluate_full_dataset",
    ),
    "metrics that change names": (
        {"evaluate_batch": lambda self, batch, batch_idx: {f"m{batch_idx}": 1.0}},
        r"\['m1'\] for validation batch",
    ),
    "reducers of other metrics": (
        {"evaluation_reducer": lambda self: {"other": 1}},
        r"\['other'\].*\['validation_loss'\]",
    ),
    "metrics that change shapes": (
        {"evaluate_batch": lambda self, batch, batch_idx: {"m": torch.zeros(batch_idx + 1)}},
        r"'m' has another shape for some batches: \[\(1,\), \(2,\), \(3,\)\]",
    ),
    "evaluation reducer that is a text": (
        {"evaluation_reducer": lambda self: "mean"},
        "members of det_lightning.pytorch.Reducer; got .*'mean'",
    ),
    "torch's loader for training": (
        {"build_training_data_loader": lambda self: torch.utils.data.DataLoader(make_data())},
        r"call context\.experimental\.disable_dataset_reproducibility_checks",
    ),
    "torch's loader for validation": (
        {"build_validation_data_loader": lambda self: torch.utils.data.DataLoader(make_data())},
        r"build_validation_data_loader\(\) returned",
    ),
    "no validation data": (
        {"build_validation_data_loader": lambda self: self.api.DataLoader(EMPTY)},
        "validation loader is empty",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_IN_INIT)
def test_mistake_in_init_is_refused(mistake: str) -> None:
    build, match = WRONG_IN_INIT[mistake]
    raises_alike(built(build), match)


@pytest.mark.parametrize("mistake", WRONG_METHODS)
def test_mistake_in_methods_is_refused(mistake: str) -> None:
    methods, match = WRONG_METHODS[mistake]
    raises_alike(changed(**methods), match)


def test_uncleared_gradients_under_aggregation_are_refused() -> None:
    def train_batch(self: Any, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.backward(self.loss(batch))
        self.context.step_optimizer(self.optimizer, auto_zero_grads=False)

    raises_alike(changed(train_batch=train_batch), "aggregation_frequency=2", init={"aggregation_frequency": 2})


@pytest.mark.parametrize("value", [lambda api: 5, None], ids=["number", "none"])
def test_length_that_is_no_unit_is_refused(value: Any) -> None:
    raises_alike(Basic, "max_length", max_length=value)


@pytest.mark.parametrize(("name", "given"), [("s", {"a": 1}), (None, 3)], ids=["named dict", "nameless number"])
def test_reducer_that_contradicts_its_name_is_refused(name: str | None, given: Any) -> None:
    def summarize(values: list[Any]) -> Any:
        return given

    raises_alike(built(lambda trial: trial.context.wrap_reducer(summarize, name=name)), r"summarize\(\)")


@pytest.mark.parametrize("size", ["8", 0.5])
def test_global_batch_size_that_is_no_integer_is_refused(size: Any) -> None:
    raises_alike(Basic, "global_batch_size'?.? must be an int", init={"hparams": {"global_batch_size": size}})


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": None},
        {"shuffle": True, "sampler": torch.utils.data.SequentialSampler(range(3))},
        {"batch_sampler": torch.utils.data.BatchSampler(range(3), 1, False), "drop_last": True},
    ],
    ids=" and ".join,
)
def test_arguments_that_torchs_loader_refuses_are_refused(arguments: dict[str, Any]) -> None:
    raises_alike(changed(build_training_data_loader=lambda self: self.api.DataLoader(make_data(), **arguments)), "")
