"""Every mistake is reported, with its line, its keys, the value and what was expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from det_lightning.config import read_config, read_given
from det_lightning.config.experiment import compile_log_pattern
from det_lightning.errors import ConfigError, DetLightningError
from tests.config.configurations import mistakes_in, read, read_alone

AZURE_TWICE = "checkpoint_storage: {type: azure, container: c, connection_string: s, account_url: 'https://a.b'}"


@pytest.mark.parametrize(
    ("text", "line", "path", "message"),
    [
        ("max_restart: 3", 1, "max_restart", "unknown key; did you mean max_restarts?"),
        ("resources:\n  slots_per_tral: 2", 2, "resources.slots_per_tral", "did you mean slots_per_trial?"),
        ("lr: 2\nhyperparameters: {lr: 1}", 1, "lr", "unknown key here; did you mean hyperparameters.lr?"),
        ("resources: {debug: true}", 1, "resources.debug", "unknown key here; did you mean debug at the top level?"),
        ("max_restarts: -1", 1, "max_restarts", "must be at least 0; got -1"),
        ("max_restarts: '5'", 1, "max_restarts", "must be an integer; got '5'"),
        ("max_restarts: 1e20", 1, "max_restarts", "must be less than 9223372036854775808; got 100000000000000000000"),
        ("min_validation_period: {batches: 1e20}", 1, "min_validation_period.batches", "less than 9223372036854775808"),
        ("debug: 1", 1, "debug", "must be true or false; got 1"),
        ("name: [a]", 1, "name", "must be a string; got ['a']"),
        ("entrypoint: 3", 1, "entrypoint", "must be module:Class, a command, or a list"),
        ("checkpoint_policy: bets", 1, "checkpoint_policy", "must be 'best', 'all' or 'none'; got 'bets'"),
        ("workspace: a", 1, "project", "is missing: set both workspace and project, or neither"),
        ("min_validation_period: {epoch: 1}", 1, "min_validation_period.epoch", "unknown unit; did you mean epochs?"),
        ("reproducibility: {experiment_seed: 4294967296}", 1, "reproducibility.experiment_seed", "less than 42949672"),
        ("resources: {priority: 100}", 1, "resources.priority", "must be at most 99; got 100"),
        ("resources:\n  slots_per_trial: 4\n  max_slots: 2", 3, "resources.max_slots", "at least slots_per_trial, 4"),
        ("environment: {environment_variables: [=3]}", 1, "environment.environment_variables[0]", "must be NAME=VALUE"),
        ("log_policies: [{pattern: a, action: x}]", 1, "log_policies[0].action", "must be 'cancel_retries' or"),
        (f"log_policies: [{{pattern: '{'(' * 5000}'}}]", 1, "log_policies[0].pattern", "is not a regular expression"),
        ("log_policies: [{pattern: 'a{9999999999}'}]", 1, "log_policies[0].pattern", "is not a regular expression"),
        ("log_policies: [{pattern: '('}]", 1, "log_policies[0].pattern", "is not a regular expression"),
        ("profiling: {begin_on_batch: 9, end_after_batch: 8}", 1, "profiling.end_after_batch", "least begin_on_batch"),
        ("checkpoint_storage: {type: hdfs}", 1, "checkpoint_storage.type", "it was removed from Determined"),
        (
            "checkpoint_storage: {host_path: /x}",
            1,
            "checkpoint_storage",
            "type is missing; your master supplied it; host_path belongs to shared_fs",
        ),
        ("checkpoint_storage: {hostpath: b}", 1, "checkpoint_storage.hostpath", "unknown key"),
        ("checkpoint_storage: {type: s3, bucket: a, host_path: b}", 1, "checkpoint_storage.host_path", "unknown key"),
        ("checkpoint_storage: {type: gcs, bucket: a, prefix: ../b}", 1, "checkpoint_storage", "must not contain '..'"),
        ("checkpoint_storage: {type: shared_fs, host_path: a}", 1, "checkpoint_storage", "host_path must be absolute"),
        (AZURE_TWICE, 1, "checkpoint_storage.account_url", "cannot be set together with connection_string"),
    ],
)
def test_mistake_in_a_section_is_named(text: str, line: int, path: str, message: str) -> None:
    (mistake,) = mistakes_in(text)
    assert (mistake.line, mistake.path) == (line, path)
    assert message in mistake.message


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("searcher: {name: single, metric: loss}", "entrypoint"),
        ("entrypoint: python3 train.py", "searcher"),
        ("entrypoint: python3 train.py\nsearcher: {name: single}", "searcher.metric"),
        ("entrypoint: python3 train.py\nsearcher: {metric: loss}", "searcher.name"),
        ("entrypoint: model_def:T\nsearcher: {name: single, metric: loss}", "searcher.max_length"),
    ],
)
def test_experiments_need_more_than_parts(text: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(f"{text}\n")
    (mistake,) = caught.value.mistakes
    assert mistake.path == path
    assert mistake.message.startswith("is missing")
    read_config(f"{text}\n", partial=True)


def test_mistakes_come_together(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.yaml"
    file.write_text(
        "entrypoint: model_def:T\n"
        "hyperparameters:\n"
        "  lr: {type: log, minval: -3, maxval: -1, base: 10}\n"
        "searcher:\n"
        "  name: grid\n"
        "  metric: loss\n"
        "  max_length: 100\n"
        "min_checkpoint_period: {records: 5}\n"
        "max_steps: 3\n"
        "resources: {slots_per_trial: a}\n"
        "debug: .inf\n"
        "debug: true\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    assert isinstance(caught.value, DetLightningError)
    assert isinstance(caught.value, ValueError)
    assert [(mistake.line, mistake.path) for mistake in caught.value.mistakes] == [
        (3, "hyperparameters.lr.count"),
        (7, "searcher.max_length"),
        (8, "min_checkpoint_period.records"),
        (9, "max_steps"),
        (10, "resources.slots_per_trial"),
        (11, "debug"),
        (12, "debug"),
    ]
    message = str(caught.value)
    assert message.startswith(f"{file} has 7 mistakes:\n  line 3: hyperparameters.lr.count: is missing")
    assert len(message.splitlines()) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"max_restarts: a", r"line 1: max_restarts: must be an integer; got 'a'$"),
        *((content, "must be a mapping") for content in (b"", b"- a", b"just text")),
        (b"\xff", "is not UTF-8"),
        (None, "cannot be read: No such file"),
    ],
)
def test_one_mistake_is_one_line(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "const.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"const.yaml: {message}"):
        read_config(file, partial=content == b"max_restarts: a")


def test_a_common_pattern_matches() -> None:
    """Patterns of log policies are written for Go: those that Python reads otherwise are refused."""
    pattern = compile_log_pattern(".*CUDA out of memory.*")
    assert pattern.search("RuntimeError: CUDA out of memory. Tried")
    assert not pattern.search("CUDA error")


@pytest.mark.parametrize("pattern", ["[[:alpha:]]", "[^[:^digit:]]", r"\Qa.b\E", r"\pL", "[a", "(", "[" * 2_000])
def test_syntax_of_go_is_refused(pattern: str) -> None:
    with pytest.raises(re.error):
        compile_log_pattern(pattern)


def test_a_mistake_shows_no_secret() -> None:
    text = """
        checkpoint_storage:
          type: s3
          bucket: b
          secret_key: [hunter2]
          sekret_key: hunter2
        environment:
          registry_auth: hunter2
          environment_variables: [[WANDB_API_KEY=hunter2]]
    """
    found = mistakes_in(text)
    assert len(found) == 4
    assert "hunter2" not in str(found)


def test_hyperparameters_are_shown_whatever_their_names() -> None:
    found = mistakes_in("""
        hyperparameters:
          api_key: {type: int, minval: 4711, maxval: 815}
          password: {type: hunter2}
          secrets:
            a: {type: double, minval: 4711, maxval: hunter2}
            b: {type: log, minval: 4711, maxval: 4712, base: 9}
          pin_password: 0471
    """)
    assert [(mistake.path.removeprefix("hyperparameters."), mistake.message) for mistake in found] == [
        ("api_key.maxval", "must be greater than minval, 4711; got 815"),
        ("password.type", "unknown type 'hunter2'; known are categorical, const, double, int, log"),
        ("secrets.a.maxval", "must be a number; got 'hunter2'"),
        ("secrets.b.minval", "is too large an exponent of the base, 9; got 4711"),
        ("pin_password", "0471 is 471 in YAML 1.2 and 313 before: write 471 or 0o471"),
    ]


def test_nulls_and_whole_floats_are_read() -> None:
    nulls = "max_restarts: null\nresources:\nlabels: ~\ncheckpoint_storage: {type: null}\nmin_validation_period: null\n"
    config = read(nulls + "reproducibility: {experiment_seed: 1}")
    assert config.as_dict() == read("reproducibility: {experiment_seed: 1}").as_dict()
    assert type(read("max_restarts: 5.0").max_restarts) is int


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "const.yaml"
    file.write_bytes(b"\xef\xbb\xbfmax_restarts: 3")
    assert read_config(str(file), partial=True).max_restarts == 3


def test_texts_have_line_breaks() -> None:
    assert read_alone("entrypoint: python3 a.py\nsearcher: {name: single, metric: a}").entrypoint == "python3 a.py"
    with pytest.raises(ConfigError, match="No such file"):
        read_config("max_restarts: 3")
    with pytest.raises(ConfigError, match="half a character"):
        read_given('"na\\ud800me": a\n')
