"""What Determined refuses is refused, with the same kind of error, and with the culprit named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.sides import raises_alike
from tests.conformance.trials import Basic, make_data


def changed(**methods: Any) -> type[Basic]:
    return type("Changed", (Basic,), methods)


def built(build: Any) -> type[Basic]:
    """Return a trial whose ``__init__`` goes on with ``build(api, context, trial)``."""

    class Built(Basic):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            build(self.api, context, self)

    return Built


def fails(trial: type[Basic], match: str, **fit: Any) -> None:
    raises_alike(trial, match, **{"max_length": 3, **fit})


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda api, context, trial: context.models.clear(), "no wrapped model"),
        (lambda api, context, trial: context.optimizers.clear(), "no wrapped optimizer"),
        (
            lambda api, context, trial: context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.ReduceLROnPlateau(trial.optimizer), api.LRScheduler.StepMode.STEP_EVERY_BATCH
            ),
            "ReduceLROnPlateau was wrapped with step_mode",
        ),
        (
            lambda api, context, trial: context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.StepLR(torch.optim.SGD(trial.model.parameters(), 1.0), 1),
                api.LRScheduler.StepMode.MANUAL_STEP,
            ),
            r"StepLR got an optimizer \(SGD\)",
        ),
        (
            lambda api, context, trial: context.wrap_lr_scheduler(
                torch.optim.lr_scheduler.StepLR(trial.optimizer, 1), "every batch"
            ),
            "step_mode must be .*'every batch'",
        ),
        (lambda api, context, trial: context.wrap_reducer(3, name="three"), r"got 3 of type int \(name='three'\)"),
        (lambda api, context, trial: context.wrap_scaler(torch.amp.GradScaler("cpu")), "before the first wrap_model"),
        (lambda api, context, trial: context.set_stop_requested("yes"), "takes a bool; got 'yes'"),
        (lambda api, context, trial: context.get_hparam("lr"), "has no hparams"),
        (lambda api, context, trial: context.get_experiment_config(), "no experiment configuration"),
        (lambda api, context, trial: context.get_global_batch_size(), "batch size is unknown"),
        (lambda api, context, trial: context.current_train_batch(), "training has not started"),
        (lambda api, context, trial: context.get_trial_seed(), "no seed"),
        (
            lambda api, context, trial: context.wrap_optimizer(
                torch.optim.SGD(trial.model.parameters(), 1.0), backward_passes_per_step=0
            ),
            "backward_passes_per_step.*got 0",
        ),
    ],
)
def test_building_a_trial(build: Any, match: str) -> None:
    fails(built(build), match)


def test_the_same_reducer_twice() -> None:
    def build(api: Any, context: Any, trial: Any) -> None:
        class Own(api.MetricReducer):
            reset = per_slot_reduce = cross_slot_reduce = lambda self, *args: None

        own = Own()
        context.wrap_reducer(own, name="one")
        context.wrap_reducer(own, name="two")

    fails(built(build), r"same Own object a second time \(name='two'\)")


def test_wrapped_reducer_is_not_wrapped_again() -> None:
    def build(api: Any, context: Any, trial: Any) -> None:
        context.wrap_reducer(context.wrap_reducer(len, name="one"), name="two")

    fails(built(build), r"same FunctionReducer object a second time \(name='two'\)")


@pytest.mark.parametrize(
    ("methods", "match"),
    [
        ({"evaluate_full_dataset": lambda self, data_loader: {}}, "evaluate_batch and evaluate_full_dataset"),
        ({"evaluate_batch": lambda self, batch, batch_idx: {f"m{batch_idx}": 1.0}}, r"\['m1'\] for validation batch"),
        ({"evaluation_reducer": lambda self: {"other": 1}}, r"\['other'\].*\['validation_loss'\]"),
        (
            {"evaluate_batch": lambda self, batch, batch_idx: {"m": torch.zeros(batch_idx + 1)}},
            r"'m' has another shape for some batches: \[\(1,\), \(2,\), \(3,\)\]",
        ),
        ({"evaluation_reducer": lambda self: "mean"}, "members of det_lightning.pytorch.Reducer; got .*'mean'"),
        (
            {"build_training_data_loader": lambda self: torch.utils.data.DataLoader(make_data())},
            r"call context\.experimental\.disable_dataset_reproducibility_checks",
        ),
        (
            {"build_validation_data_loader": lambda self: torch.utils.data.DataLoader(make_data())},
            r"build_validation_data_loader\(\) returned",
        ),
    ],
)
def test_running_a_trial(methods: dict[str, Any], match: str) -> None:
    fails(changed(**methods), match)


def test_an_empty_validation_loader() -> None:
    empty = torch.utils.data.Subset(make_data(), [])
    fails(changed(build_validation_data_loader=lambda self: self.api.DataLoader(empty)), "validation loader is empty")


def test_uncleared_gradients_under_aggregation() -> None:
    def train_batch(self: Any, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.backward(self.loss(batch))
        self.context.step_optimizer(self.optimizer, auto_zero_grads=False)

    fails(changed(train_batch=train_batch), "aggregation_frequency=2", init={"aggregation_frequency": 2})


@pytest.mark.parametrize("value", [lambda api: 5, None])
def test_no_length(value: Any) -> None:
    fails(Basic, "max_length", max_length=value)


@pytest.mark.parametrize(("name", "given"), [("s", {"a": 1}), (None, 3)])
def test_reducers_of_an_unfit_name(name: str | None, given: Any) -> None:
    def build(api: Any, context: Any, trial: Any) -> None:
        def summarize(values: list[Any]) -> Any:
            return given

        context.wrap_reducer(summarize, name=name)

    fails(built(build), r"summarize\(\)")


@pytest.mark.parametrize("size", ["8", 0.5])
def test_a_global_batch_size_that_is_no_integer(size: Any) -> None:
    fails(Basic, "global_batch_size'?.? must be an int", init={"hparams": {"global_batch_size": size}})


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
def test_arguments_of_the_data_loader(arguments: dict[str, Any]) -> None:
    fails(changed(build_training_data_loader=lambda self: self.api.DataLoader(make_data(), **arguments)), "")
