"""Files as people wrote them for earlier releases."""

from __future__ import annotations

from typing import Any

import pytest

from det_lightning.config import Length
from tests.config.configurations import mistakes_in, read_alone, read_part

STEPS = """
    description: mnist in steps
    labels: {mnist: true, demo: true}
    data:
      url: https://example.com/mnist.tar.gz
    batches_per_step: 50
    hyperparameters:
      global_batch_size: {type: const, val: 64}
      learning_rate: {type: log, base: 10, minval: -4, maxval: -2}
    searcher:
      name: adaptive_simple
      metric: validation_loss
      smaller_is_better: true
      max_trials: 12
      max_steps: 20
      max_rungs: 3
    min_validation_period: 2
    min_checkpoint_period: 4
    optimizations: {mixed_precision: O1, tensor_fusion_cycle_time: 5}
    environment:
      image: {gpu: a/gpu, cpu: a/cpu}
      environment_variables: {gpu: [A=1], cpu: [A=2]}
    resources: {agent_label: big, slots_per_trial: 2}
    entrypoint: model_def:MNistTrial
"""

SCRIPT = """
    name: newest
    workspace: w
    project: p
    entrypoint: python3 -m determined.launch.torch_distributed python3 train.py
    searcher: {name: async_halving, metric: loss, num_rungs: 3, max_trials: 4, max_time: 64, time_metric: batches}
    resources: {slots_per_trial: 8, resource_pool: a100, is_single_node: true, shm_size: 4G}
    environment:
      image: a/b
      proxy_ports: [{proxy_port: 8080, proxy_tcp: true}]
    log_policies:
    - {name: oom, pattern: out of memory, action: cancel_retries}
    - {pattern: ECC, action: {type: exclude_node}}
    retention_policy: {log_retention_days: 90}
    integrations: {webhooks: {exclude: true}}
    profiling: {enabled: true}
    slurm: {sbatch_args: [--exclusive]}
    pbs: {pbsbatch_args: [-p1000]}
    preemption_timeout: 60
    version: 0
"""


def test_a_file_of_0_12_counts_in_steps() -> None:
    config = read_alone(STEPS)
    assert config.searcher.name == "adaptive_asha"
    assert config.searcher.max_length == Length(1000, "batches")
    assert config.scheduling_unit == 50
    assert config.min_validation_period == Length(100, "batches")
    assert config.min_checkpoint_period == Length(200, "batches")
    assert config.labels == ["mnist", "demo"]
    assert config.environment.image.cuda == "a/gpu"
    assert config.environment.environment_variables.cuda == ["A=1"]
    assert config.environment.environment_variables.rocm == []
    assert [(note.line, note.path) for note in config.notes] == [
        (2, "labels"),
        (5, "batches_per_step"),
        (10, "searcher.name"),
        (14, "searcher.max_steps"),
        (16, "min_validation_period"),
        (17, "min_checkpoint_period"),
        (20, "environment.image.gpu"),
        (21, "environment.environment_variables.gpu"),
    ]
    assert str(config.notes[3]) == "line 14: searcher.max_steps: read as searcher.max_length: {'batches': 1000}"


def test_files_of_0_38_stay() -> None:
    config = read_alone(SCRIPT)
    assert config.notes == ()
    assert config.trial_class is None
    assert [policy.action for policy in config.log_policies] == ["cancel_retries", "exclude_node"]
    assert config.environment.image.cpu == config.environment.image.cuda == "a/b"


BATCHES_45 = {"searcher": {"max_length": {"batches": 45}}}
BATCHES_300 = {"batches": 300}
IMAGE = {"cpu": None, "cuda": "a", "rocm": None}
POLICIES = {
    "policy: {type: on_failure_dont_retry}": "cancel_retries",
    "policy: {type: on_failure_exclude_node, restarts: 2}": "exclude_node",
    "policy: {type: send_webhook, webhook_name: w}": None,
    "action: {type: cancel_retries}": "cancel_retries",
}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("searcher: {name: single, max_steps: 5}", {"searcher": {"max_length": {"batches": 500}}}),
        ("batches_per_step: 9\nsearcher: {name: single, target_trial_steps: 5}", BATCHES_45),
        ("min_validation_period: 3\nsearcher: {name: single, max_steps: 9}", {"min_validation_period": BATCHES_300}),
        ("min_checkpoint_period: 3\nbatches_per_step: 7", {"min_checkpoint_period": {"batches": 21}}),
        ("log_pattern_policies: []", {"log_policies": []}),
        ("log_pattern_policies: null\nintegration: null\nlog_policies: []", {"log_policies": []}),
        ("slurm: {gpu_type: a}\nenvironment: {slurm: [-A]}", {"slurm": {"gpu_type": "a", "sbatch_args": ["-A"]}}),
        ("environment: {pbs: [-p1]}", {"pbs": {"pbsbatch_args": ["-p1"]}}),
        ("environment: {image: {gpu: null, cuda: a}}", {"environment": {"image": IMAGE}}),
        *[
            (
                f"log_pattern_policies: [{{pattern: a, {policy}}}]",
                {"log_policies": [{"name": None, "pattern": "a", "action": action}]},
            )
            for policy, action in POLICIES.items()
        ],
        ("integration: {pachyderm: {}}", {"integrations": {"pachyderm": {}}}),
    ],
)
def test_older_spellings_are_rewritten(text: str, changed: dict[str, Any]) -> None:
    defaulted = read_part(text).as_dict()
    for section, value in changed.items():
        entries = defaulted[section]
        assert {**entries, **value} == entries if isinstance(value, dict) else entries == value


@pytest.mark.parametrize(
    ("text", "line", "path", "message"),
    [
        ("searcher:\n  name: single\n  max_steps: many", 3, "searcher.max_steps", "must be an integer; got 'many'"),
        ("searcher:\n  name: single\n  max_steps: 0", 3, "searcher.max_length.batches", "at least 1; got 0"),
        (
            "searcher:\n  name: single\n  max_length: {batches: 3}\n  max_steps: 2",
            4,
            "searcher.max_steps",
            "is the older name of searcher.max_length, which is also set: delete one of the two",
        ),
        ("scheduling_unit: 5\nbatches_per_step: 5", 2, "batches_per_step", "is the older name of scheduling_unit"),
        (
            "log_policies:\n- pattern: a\n  policy: {type: stop}",
            3,
            "log_policies[0].action",
            "must be 'cancel_retries' or 'exclude_node'; got 'stop'",
        ),
        ("min_validation_period: 3", 1, "min_validation_period", "must be one of {batches: N}"),
    ],
)
def test_mistakes_have_the_old_line(text: str, line: int, path: str, message: str) -> None:
    (mistake,) = mistakes_in(text)
    assert (mistake.line, mistake.path) == (line, path)
    assert message in mistake.message


@pytest.mark.parametrize(
    ("entrypoint", "trial_class"),
    [
        ("model_def:MyTrial", "model_def:MyTrial"),
        ("|\n  model_def:MyTrial\n", "model_def:MyTrial"),
        ("python3 -m determined.launch.torch_distributed --trial model_def:T", "model_def:T"),
        ("python3 -m determined.launch.horovod --fusion-threshold-mb 3 -- --trial=model_def:T", "model_def:T"),
        ("[python3, -m, determined.launch.autohorovod, 'model_def:T']", "model_def:T"),
        ("python3 -m determined.exec.harness model_def:T", "model_def:T"),
        ("python3 -m determined.launch.torch_distributed python3 train.py", None),
        ("[python3, train.py]", None),
    ],
)
def test_trial_classes_are_found(entrypoint: str, trial_class: str | None) -> None:
    search = "searcher: {name: single, metric: a, max_length: {batches: 1}}"
    assert read_alone(f"entrypoint: {entrypoint}\n{search}").trial_class == trial_class
