"""The defaulted configuration: complete, masked for display only, and read again as the same."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from det_lightning.checkpoint.storage.storage_config import storage_from_config
from det_lightning.config import ExperimentConfig, Length, read_config
from det_lightning.errors import ConfigError
from det_lightning.units import Batch, Epoch, TrainUnit
from tests.config.configurations import read, read_part


def test_a_configuration_has_all_defaults() -> None:
    """The others are in docs/reference/configuration.md, which another test compares with the fields."""
    plain = read("").as_dict()
    assert list(plain) == list(ExperimentConfig.model_fields)
    assert plain["hyperparameters"] == {"global_batch_size": {"type": "const", "val": 32}}
    assert plain["min_validation_period"] == plain["min_checkpoint_period"] == {"batches": 0}
    assert plain["environment"]["environment_variables"] == {"cpu": [], "cuda": [], "rocm": []}
    assert plain["environment"]["image"] == {"cpu": None, "cuda": None, "rocm": None}
    assert plain["checkpoint_storage"]["type"] is None
    assert plain["log_policies"] == [
        {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*", "action": None},
        {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*", "action": None},
    ]


def test_the_default_seed_is_the_time() -> None:
    before = int(time.time())
    seed = read("").reproducibility.experiment_seed
    assert before <= seed <= time.time()


def test_secrets_are_masked_in_display() -> None:
    config = read_part("""
        data: {secrets: {token: kept}, url: "https://user:kept@example.com"}
        checkpoint_storage: {type: s3, bucket: b, secret_key: hunter2, endpoint_url: "https://user:hunter2@host"}
        tensorboard_storage: {type: s3, bucket: b, secret_key: hunter2}
        environment: {environment_variables: {cpu: [LOGIN=hunter2]}, registry_auth: {password: hunter2}}
    """)
    assert "hunter2" not in json.dumps(config.as_dict(masked=True))
    assert "hunter2" not in repr(config)
    assert config.as_dict(masked=True)["data"] == {"secrets": {"token": "kept"}, "url": "https://user:kept@example.com"}
    assert config.environment.environment_variables.cpu == ["LOGIN=hunter2"]


@pytest.mark.parametrize(
    "section",
    [
        {"type": "shared_fs", "host_path": "/a", "storage_path": "b", "propagation": "private", "save_trial_best": 2},
        {"type": "shared_fs", "host_path": "/a", "checkpoint_path": "cp", "container_path": "/c"},
        {"type": "directory", "container_path": "/a"},
        {"type": "s3", "bucket": "b", "prefix": "p", "endpoint_url": "http://a", "access_key": "k", "secret_key": "s"},
        {"type": "azure", "container": "c", "account_url": "https://a.blob.core.windows.net", "credential": "x"},
    ],
)
def test_storages_have_one_location(section: dict[str, Any]) -> None:
    config = read_config({"checkpoint_storage": section}, partial=True)
    assert storage_from_config(config.checkpoint_storage.location()) == storage_from_config(section)


@pytest.mark.parametrize(
    ("length", "unit"),
    [
        (Length(3, "batches"), Batch(3)),
        (Length(3, "epochs"), Epoch(3)),
        (Length(100, "records"), Batch(3)),
        (Length(5, "records"), Batch(1)),
        (Length(0, "batches"), Batch(sys.maxsize)),
        (Length(0, "records"), Batch(sys.maxsize)),
    ],
)
def test_a_length_is_a_unit_of_training(length: Length, unit: TrainUnit) -> None:
    assert repr(length.train_unit(global_batch_size=32)) == repr(unit)


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="global_batch_size"):
        Length(9, "records").train_unit()
    with pytest.raises(ValueError, match="unit"):
        Length(9, None).train_unit()


TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
LENGTH = st.builds(lambda unit, units: {unit: units}, st.sampled_from(["batches", "epochs"]), st.integers(1, 10**9))
RANGE = st.builds(
    lambda kind, minval, maxval: {**kind, "minval": minval, "maxval": maxval, "count": 3},
    st.sampled_from([{"type": "int"}, {"type": "double"}, {"type": "log", "base": 10}]),
    st.integers(-100, 0),
    st.integers(1, 100),
)
CHOICE = st.lists(JSON, min_size=1, max_size=3).map(lambda vals: {"type": "categorical", "vals": vals})
NAMES = TEXT.filter(lambda name: name != "type")
HYPERPARAMETERS = st.dictionaries(
    NAMES,
    st.recursive(st.integers() | TEXT | RANGE | CHOICE, lambda inner: st.dictionaries(NAMES, inner, max_size=2)),
    max_size=4,
)
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "entrypoint": st.sampled_from(["model_def:T", "python3 train.py", ["python3", "train.py"]]),
        "searcher": st.fixed_dictionaries(
            {"name": st.sampled_from(["single", "grid"]), "metric": TEXT, "max_length": LENGTH},
            optional={"smaller_is_better": st.booleans(), "source_checkpoint_uuid": TEXT},
        ),
    },
    optional={
        "name": TEXT,
        "data": st.dictionaries(TEXT, JSON, max_size=3),
        "hyperparameters": HYPERPARAMETERS,
        "labels": st.lists(TEXT, max_size=2),
        "max_restarts": st.integers(0, 9),
        "min_validation_period": LENGTH,
        "reproducibility": st.fixed_dictionaries({"experiment_seed": st.integers(0, 2**32 - 1)}),
        "resources": st.fixed_dictionaries(
            {}, optional={"slots_per_trial": st.integers(0, 8), "weight": st.floats(0, 9)}
        ),
        "optimizations": st.fixed_dictionaries({}, optional={"aggregation_frequency": st.integers(1, 9)}),
        "checkpoint_policy": st.sampled_from(["best", "all", "none"]),
    },
)


@given(CONFIGURATIONS)
@settings(max_examples=20)
def test_defaults_and_texts_read_alike(configuration: dict[str, Any]) -> None:
    configuration.setdefault("reproducibility", {"experiment_seed": 1})
    before = json.dumps(configuration)
    defaulted = read_config(configuration).as_dict()
    assert read_config(defaulted).as_dict() == defaulted
    from_text = read_config(before + "\n")
    assert (from_text.as_dict(), from_text.notes) == (defaulted, ())
    read_config(configuration, ["searcher.metric=other", "resources.slots_per_trial=0"])
    assert json.dumps(configuration) == before


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*ExperimentConfig.model_fields]) | TEXT, JSON, max_size=4))
def test_whatever_is_wrong_is_one_error(configuration: dict[str, Any]) -> None:
    try:
        read_config(configuration, partial=True)
    except ConfigError as e:
        assert e.mistakes
        assert all(mistake.message for mistake in e.mistakes)


@given(st.text())
def test_any_text_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError):
        read_config(text + "\n")
