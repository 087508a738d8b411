"""Which fields have an effect, in one table for messages and docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.config.effects import FIELD_RULES, field_effects, without_effect_in_calls
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.reading import read_config, read_given
from det_lightning.config.searchers import REFUSED_SEARCHERS
from tests.config.configurations import mistakes_in, read, read_part

ROOT = Path(__file__).parents[2]


def test_the_docs_show_the_table() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "write_field_table.py", "--check"], check=True)
    documented = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    fields = [rule.field for rule in FIELD_RULES]
    assert len(set(fields)) == len(fields)
    for name in [*ExperimentConfig.model_fields, *fields]:
        assert f"`{name}`" in documented or f"`{name}." in documented


def test_refused_rows_are_refused() -> None:
    refused = {rule.field.rpartition(": ")[2] for rule in FIELD_RULES if rule.effect == "refused"}
    assert refused == {*REFUSED_SEARCHERS, "hdfs", "searcher.source_trial_id"}
    for name in REFUSED_SEARCHERS:
        assert "cannot be used" in mistakes_in(f"searcher: {{name: {name}}}")[0].message


@pytest.mark.parametrize(
    ("text", "effects"),
    [
        ("name: a", {"name": "used"}),
        ("resources: {shm_size: 3}", {"resources.shm_size": "ignored"}),
        ("resources: {weight: null}", {}),
        ("optimizations: {mixed_precision: O1}", {"optimizations.mixed_precision": "warned"}),
        ("profiling: {enabled: true}", {"profiling": "warned"}),
        ("profiling: {enabled: false, begin_on_batch: 200}", {"profiling": "ignored"}),
        ("environment: {environment_variables: [A=1]}", {"environment.environment_variables": "used"}),
        (
            "checkpoint_storage: {type: gcs, bucket: b}",
            {"checkpoint_storage.type": "used", "checkpoint_storage.bucket": "used"},
        ),
        ("batches_per_step: 3", {"scheduling_unit": "used"}),
    ],
)
def test_given_fields_have_effects(text: str, effects: dict[str, str]) -> None:
    assert {effect.path: effect.effect for effect in field_effects(read_part(text))} == effects


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("name: a\nmin_validation_period: {batches: 3}\noptimizations: {aggregation_frequency: 2}", []),
        ("searcher: {name: grid, max_concurrent_trials: 2}", ["searcher.max_concurrent_trials", "searcher.name"]),
        ("bind_mounts: [{host_path: /a, container_path: /a}]\nmax_restarts: 1", ["bind_mounts", "max_restarts"]),
        ("max_restarts: 5\nresources: {slots_per_trial: 1, shm_size: null}\nslurm: {sbatch_args: []}", []),
        (
            "searcher: {name: random, max_trials: 2, max_concurrent_trials: 16}",
            ["searcher.max_trials", "searcher.name"],
        ),
    ],
)
def test_runner_fields_are_idle_in_calls(text: str, fields: list[str]) -> None:
    assert without_effect_in_calls(read_part(text)) == fields


def test_read_fields_are_not_idle() -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 8}}
    full = read_config({"searcher": searcher, "entrypoint": "a:B"}).as_dict()  # defaults are never idle
    assert without_effect_in_calls(read_given(full).typed, idle=("checkpoint_policy", "checkpoint_storage")) == []
    config = read_part("records_per_epoch: 64\ndata_layer: {type: shared_fs}\ncheckpoint_policy: all")
    assert without_effect_in_calls(config) == ["data_layer", "records_per_epoch"]
    assert without_effect_in_calls(config, read=("data_layer", "records_per_epoch")) == []
    idle = without_effect_in_calls(config, read=("records_per_epoch",), idle=("checkpoint_policy",))
    assert idle == ["checkpoint_policy", "data_layer"]


def test_effects_have_lines_in_order() -> None:
    effects = field_effects(read("security: {}\ndata: {a: 1}\nresources:\n  priority: 3"))
    places = [(effect.line, effect.path) for effect in effects]
    assert places[:3] == [(1, "security"), (2, "data"), (4, "resources.priority")]


def test_missing_mounts_are_warned_of(tmp_path: Path) -> None:
    config = read_part(f"""
        bind_mounts:
        - {{host_path: /data, container_path: /data}}
        - {{host_path: /data, container_path: {tmp_path}}}
        - {{host_path: /data, container_path: {tmp_path}/missing}}
    """)
    effects = field_effects(config)
    assert [(effect.line, effect.path, effect.effect) for effect in effects] == [
        (2, "bind_mounts[0]", "ignored"),
        (3, "bind_mounts[1]", "ignored"),
        (4, "bind_mounts[2]", "warned"),
    ]
    assert effects[2].note == f"{tmp_path}/missing does not exist here: link it to /data, or change the code"
