"""The defaulted configuration: complete, masked for display only, and read again as the same."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.checkpoint.storage.storage_config import storage_from_config
from det_lightning.config import Length, read_config
from det_lightning.errors import ConfigError
from det_lightning.units import Batch, Epoch, TrainUnit
from tests.config.configurations import read, read_part

DEFAULTED: dict[str, Any] = {
    "name": "const",
    "description": None,
    "labels": [],
    "workspace": "",
    "project": "",
    "entrypoint": "model_def:MyTrial",
    "data": {},
    "hyperparameters": {"global_batch_size": {"type": "const", "val": 32}},
    "searcher": {
        "name": "single",
        "metric": "loss",
        "smaller_is_better": True,
        "source_trial_id": None,
        "source_checkpoint_uuid": None,
        "max_length": {"epochs": 2},
    },
    "max_restarts": 5,
    "scheduling_unit": 100,
    "records_per_epoch": 0,
    "min_validation_period": {"batches": 0},
    "min_checkpoint_period": {"batches": 0},
    "perform_initial_validation": False,
    "checkpoint_policy": "best",
    "checkpoint_storage": {
        "type": None,
        "save_experiment_best": 0,
        "save_trial_best": 1,
        "save_trial_latest": 1,
    },
    "optimizations": {
        "aggregation_frequency": 1,
        "average_aggregated_gradients": True,
        "average_training_metrics": True,
        "gradient_compression": False,
        "mixed_precision": "O0",
        "tensor_fusion_threshold": 64,
        "tensor_fusion_cycle_time": 1,
        "auto_tune_tensor_fusion": False,
        "grad_updates_size_file": None,
    },
    "reproducibility": {"experiment_seed": 7},
    "resources": {
        "slots_per_trial": 1,
        "max_slots": None,
        "slots": None,
        "weight": 1,
        "priority": None,
        "resource_pool": "",
        "shm_size": None,
        "devices": [],
        "is_single_node": None,
        "native_parallel": False,
        "agent_label": None,
    },
    "environment": {
        "environment_variables": {"cpu": [], "cuda": [], "rocm": []},
        "image": {"cpu": None, "cuda": None, "rocm": None},
        "force_pull_image": False,
        "registry_auth": None,
        "add_capabilities": [],
        "drop_capabilities": [],
        "pod_spec": None,
        "ports": {},
        "proxy_ports": [],
    },
    "bind_mounts": [],
    "profiling": {"enabled": False, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True},
    "debug": False,
    "log_policies": [
        {"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*", "action": None},
        {"name": "ECC Error", "pattern": ".*uncorrectable ECC error encountered.*", "action": None},
    ],
    "retention_policy": {"log_retention_days": None},
    "preemption_timeout": None,
    "slurm": {"slots_per_node": None, "gpu_type": None, "sbatch_args": []},
    "pbs": {"slots_per_node": None, "pbsbatch_args": []},
    "integrations": None,
    "tensorboard_storage": None,
    "security": None,
    "data_layer": None,
    "internal": None,
}


def test_a_configuration_has_all_defaults() -> None:
    assert read("reproducibility: {experiment_seed: 7}").as_dict() == DEFAULTED


def test_the_default_seed_is_the_time() -> None:
    before = int(time.time())
    seed = read("").reproducibility.experiment_seed
    assert before <= seed <= time.time()


def test_secrets_are_masked_in_display() -> None:
    config = read_part("""
        data: {secrets: {token: hunter2}, url: "https://user:hunter2@example.com"}
        checkpoint_storage: {type: s3, bucket: b, secret_key: hunter2}
        environment: {environment_variables: [WANDB_API_KEY=hunter2], registry_auth: {password: hunter2}}
    """)
    assert "hunter2" not in json.dumps(config.as_dict(masked=True))
    assert "hunter2" not in repr(config)
    assert config.as_dict()["data"]["secrets"]["token"] == "hunter2"
    assert config.environment.environment_variables.cuda == ["WANDB_API_KEY=hunter2"]


@pytest.mark.parametrize(
    "section",
    [
        {"type": "shared_fs", "host_path": "/a", "storage_path": "b", "propagation": "private", "save_trial_best": 2},
        {"type": "shared_fs", "host_path": "/a", "tensorboard_path": "t", "container_path": "/c"},
        {"type": "directory", "container_path": "/a"},
        {"type": "s3", "bucket": "b", "prefix": "p", "endpoint_url": "http://a", "access_key": "k", "secret_key": "s"},
        {"type": "gcs", "bucket": "b", "prefix": "p"},
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
        (Length(0, "epochs"), Epoch(sys.maxsize)),
        (Length(0, "records"), Batch(sys.maxsize)),
    ],
)
def test_a_length_is_a_unit_of_training(length: Length, unit: TrainUnit) -> None:
    assert repr(length.train_unit(global_batch_size=32)) == repr(unit)


@pytest.mark.parametrize(
    ("length", "message"), [(Length(9, "records"), "global_batch_size"), (Length(9, None), "unit")]
)
def test_impossible_lengths_are_refused(length: Length, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        length.train_unit()


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
def test_defaults_read_as_themselves(configuration: dict[str, Any]) -> None:
    defaulted = read_config(configuration).as_dict()
    assert read_config(defaulted).as_dict() == defaulted


@given(CONFIGURATIONS)
def test_a_file_reads_like_its_dict(configuration: dict[str, Any]) -> None:
    configuration.setdefault("reproducibility", {"experiment_seed": 1})
    from_text = read_config(json.dumps(configuration, ensure_ascii=True) + "\n")
    assert from_text.as_dict() == read_config(configuration).as_dict()
    assert from_text.notes == ()


@given(CONFIGURATIONS)
def test_arguments_are_not_changed(configuration: dict[str, Any]) -> None:
    before = json.dumps(configuration)
    read_config(configuration, ["searcher.metric=other", "resources.slots_per_trial=0"])
    assert json.dumps(configuration) == before


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(sorted(DEFAULTED)) | TEXT, JSON | st.dictionaries(TEXT, JSON), max_size=4))
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
