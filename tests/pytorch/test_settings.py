"""Hyperparameters, experiment configuration and batch sizes, as a trial looks them up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import errors
from det_lightning.adapters import TrialModule
from det_lightning.pytorch import PyTorchTrialContext
from det_lightning.pytorch._settings import TrialSettings
from tests.trials import SmallTrial


def test_settings_are_looked_up() -> None:
    conf = {"data": {"url": "here"}, "searcher": {"metric": "loss"}}
    context = PyTorchTrialContext(hparams={"lr": 0.1, "global_batch_size": 32}, exp_conf=conf, trial_seed=7)
    assert context.get_hparams() == {"lr": 0.1, "global_batch_size": 32}
    assert context.get_hparam("lr") == 0.1
    assert context.get_experiment_config() == conf
    assert context.get_data_config() == {"url": "here"}
    assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (32, 32)
    assert context.get_trial_seed() == 7
    assert (context.get_trial_id(), context.get_experiment_id(), context.get_initial_batch()) == (0, 0, 0)
    assert PyTorchTrialContext(exp_conf={}).get_data_config() == {}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("get_hparams", "no hparams; write them into hparams={...} of init"),
        ("get_experiment_config", "no experiment configuration; pass exp_conf="),
        ("get_data_config", "no experiment configuration; pass exp_conf="),
        ("get_global_batch_size", "no hyperparameter 'global_batch_size' in hparams={...} of init"),
        ("get_per_slot_batch_size", "The batch size is unknown. There is no hyperparameter 'global_batch_size'"),
        ("get_trial_seed", "no seed; pass trial_seed="),
    ],
)
def test_missing_settings_are_named(method: str, message: str) -> None:
    with pytest.raises(errors.InternalException if method == "get_trial_seed" else ValueError, match=message):
        getattr(PyTorchTrialContext(), method)()


def test_unknown_hyperparameters_are_named() -> None:
    with pytest.raises(ValueError, match="no hparams; write them into"):
        PyTorchTrialContext().get_hparam("lr")
    with pytest.raises(ValueError, match=r"no hyperparameter 'rate' in .*; known are layers, lr"):
        PyTorchTrialContext(hparams={"lr": 1, "layers": 2}).get_hparam("rate")


@given(st.integers(1, 1000), st.integers(1, 16))
def test_batches_are_split_evenly(global_batch_size: int, slots: int) -> None:
    def settings() -> TrialSettings:
        return TrialSettings(hparams={"global_batch_size": global_batch_size}, slots=slots)

    if global_batch_size < slots:
        with pytest.raises(errors.InvalidExperimentException, match=f"is {global_batch_size}, less .* slots, {slots};"):
            settings()
    else:
        assert settings().get_per_slot_batch_size() == global_batch_size // slots
        assert settings().get_global_batch_size() == global_batch_size // slots * slots


LR_RANGE = {"type": "double", "minval": 0.1, "maxval": 0.2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hparams": [("lr", 0.1)]}, r"hparams must be a dict; got \[\('lr', 0.1\)\] of type list"),
        ({"hparams": 1, "exp_conf": [2]}, r"hparams must be a dict; .*; exp_conf must be a dict; got \[2\]"),
        ({"hparams": {"a": {"b": {"type": "categorical", "vals": [1, 2]}}}}, r"hparams\['a'\]\['b'\] describes"),
        ({"hparams": {"a": {"type": "const", "val": 1}, "b": LR_RANGE}}, r"\['a'\] describes val.*\['b'\] describes"),
        ({"hparams": {"global_batch_size": "32"}}, "must be an integer; got '32' of type str"),
        ({"hparams": {"global_batch_size": -3}}, "is -3, less than the number of slots, 1;"),
        ({"hparams": {"global_batch_size": 0}}, r"hparams\['global_batch_size'\] must be .* at least 1; got 0"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=message):
        PyTorchTrialContext(**settings)
    with pytest.raises(errors.InvalidExperimentException, match=message):
        TrialModule(SmallTrial, **settings)


def test_groups_may_have_an_entry_named_type() -> None:
    hparams = {"optimizer": {"type": "double", "lr": 0.1}, "schedule": {"type": ["log"]}, "empty": {}}
    assert PyTorchTrialContext(hparams=hparams).get_hparams() == hparams
