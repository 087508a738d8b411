"""``get_cluster_info()``: None outside of experiments, and the trial inside of one."""

from __future__ import annotations

import numpy as np
import pytest

import det_lightning
from det_lightning.core._task import TrialTask


def test_no_cluster_outside_of_experiments() -> None:
    assert det_lightning.get_cluster_info() is None


@pytest.mark.usefixtures("task")
def test_fields_of_a_trial() -> None:
    info = det_lightning.get_cluster_info()
    assert info is not None
    assert (info.trial.trial_id, info.trial.experiment_id, info.trial.trial_seed) == (2, 3, 42)
    assert info.trial.hparams == {"lr": 0.1}
    assert (info.latest_checkpoint, info.user_data, info.slot_ids) == ("some-id", {"url": "here"}, [0])
    assert (info.task_type, info.task_id, info.allocation_id) == ("TRIAL", "3.2", "3.2.1")
    assert (info.container_addrs, info.container_rank, info.container_slot_counts) == (["127.0.0.1"], 0, [1])


def test_a_report_is_a_line_of_json(task: TrialTask) -> None:
    task.report("validation", 5, {"loss": float("nan"), "size": 1})
    (line,) = task.metrics_file.read_text().splitlines()
    assert '"metrics": {"loss": "NaN", "size": 1}' in line


def test_unreportable_metric_is_named(task: TrialTask, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        task.report("training", 5, {"loss": np.float32(0.5), "raw": b"x"})
    assert ['"metrics": {"loss": 0.5}' in line for line in task.metrics_file.read_text().splitlines()] == [True, True]
    assert caplog.text.count("training metrics['raw'] is a bytes") == 1
