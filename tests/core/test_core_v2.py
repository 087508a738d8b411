"""The Core API without a ``with`` block."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_lightning import core
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.experimental import core_v2
from det_lightning.porting.python_files import port_python
from tests.launching import environment
from tests.warm_python import WarmPython


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    core_v2.close()


def test_parts_between_init_and_close() -> None:
    core_v2.init(config=core_v2.Config(name="alone", hparams={"lr": 0.5}, data={"url": "x"}, checkpoint_storage="kept"))
    assert core_v2.info.trial.hparams == {"lr": 0.5}
    assert core_v2.info.user_data == {"url": "x"}
    assert core_v2.info.latest_checkpoint is None
    assert core_v2.distributed.rank == 0
    core_v2.train.report_validation_metrics(steps_completed=1, metrics={"loss": 0.5})
    with core_v2.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
        (path / "state").write_text("1")
    assert Path("kept", uuid, "state").read_text() == "1"
    assert any(Path(core_v2.url_reverse_webui_exp_view()).iterdir())
    core_v2.close()
    core_v2.close()
    assert [core_v2.train, core_v2.checkpoint, core_v2.info] == [None, None, None]


def test_a_second_init_closes_the_first() -> None:
    core_v2.init(config=core_v2.Config(hparams={"lr": 1}))
    first = core_v2.train
    core_v2.init(config=core_v2.Config(hparams={"lr": 2}))
    assert core_v2.train is not first
    assert core_v2.info.trial.hparams == {"lr": 2}


def test_older_arguments_are_merged() -> None:
    unmanaged = core_v2.UnmanagedConfig(external_experiment_id="e", external_trial_id="t")
    for latest in (None, "saved before"):
        defaults = core_v2.DefaultConfig(hparams={"lr": 3}, checkpoint_storage="kept")
        with pytest.warns(FutureWarning, match="are deprecated; use config= instead"):
            core_v2.init(defaults=defaults, unmanaged=unmanaged)
        assert core_v2.info.trial.hparams == {"lr": 3}
        assert (core_v2.info.latest_checkpoint is None) == (latest is None)
        with core_v2.checkpoint.store_path({"steps_completed": 1}):
            pass


SCRIPT = """
import sys
from det_lightning.experimental import core_v2

experiment, trial, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = core_v2.Config(checkpoint_storage="kept", external_experiment_id=experiment, external_trial_id=trial)
core_v2.init(config=config)
step, latest = 0, core_v2.info.latest_checkpoint
if latest is not None:
    with core_v2.checkpoint.restore_path(latest) as path:
        step = int((path / "step").read_text())
print(step, core_v2.info.trial._steps_completed, end="")
for step in range(step + 1, length + 1):
    with core_v2.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "step").write_text(str(step))
core_v2.close()
"""


@pytest.mark.slow
def test_restarted_script_resumes_by_ids(warm_python: WarmPython) -> None:
    def first_step(experiment: str, trial: str, length: int) -> list[int]:
        command = [warm_python.executable, "-c", SCRIPT, experiment, trial, str(length)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        return [int(number) for number in done.stdout.split()]

    for experiment, trial in (("sweep", "a"), ("sweep", "b"), ("other", "a")):
        assert first_step(experiment, trial, 3) == [0, 0]
    assert first_step("sweep", "a", 5) == [3, 3]
    # What is deleted is not gone on from.
    storage = CheckpointStorage("kept")
    (newest,) = [name for name in storage.list_ids() if Path("kept", name, "step").read_text() == "5"]
    storage.delete(newest)
    assert first_step("sweep", "a", 5) == [4, 4]


def test_a_trial_is_named_within_an_experiment() -> None:
    with pytest.raises(ValueError, match=r"external_trial_id='t'\) names a trial of no experiment"):
        core_v2.init(config=core_v2.Config(external_trial_id="t"))
    for _ in range(2):
        core_v2.init(config=core_v2.Config(external_experiment_id="e", checkpoint_storage="kept"))
        assert core_v2.info.latest_checkpoint is None
        with core_v2.checkpoint.store_path({"steps_completed": 1}):
            pass


def test_init_context_is_for_a_with_block() -> None:
    with core_v2.init_context(config=core_v2.Config(hparams={"lr": 4})) as context:
        assert isinstance(context, core.Context)
        assert context.info is not None
        assert context.info.trial.hparams == {"lr": 4}
        assert core_v2.train is None


def test_script_alone_needs_a_config() -> None:
    with pytest.raises(ValueError, match="needs config="):
        core_v2.init()
    with pytest.raises(RuntimeError, match=r"Call core_v2\.init\(\) before"):
        core_v2.url_reverse_webui_exp_view()


def test_port_rewrites_its_import() -> None:
    after, findings = port_python("from determined.experimental import core_v2\ncore_v2.train.report_progress(0.5)\n")
    assert after == "from det_lightning.experimental import core_v2\ncore_v2.train.report_progress(0.5)\n"
    assert not findings
