"""What the commands of the documentation find: a small project, its checkpoints, and a bucket."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from filelock import FileLock

from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.cli.exported import describe_experiment, describe_trial, write
from tests.launching import ROOT, TORCHRUN, environment
from tests.warm_python import WarmPython, start_warm_python


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that still uses Determined, with checkpoints; one for all processes that run tests."""
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = tmp_path_factory.getbasetemp() if is_alone else tmp_path_factory.getbasetemp().parent
    with FileLock(folder / "project.lock"):
        if not (folder / "project").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("code"))
                write_project(folder / "unfinished")
            (folder / "unfinished").rename(folder / "project")
    return folder / "project"


@pytest.fixture(scope="session")
def ported_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that uses det_lightning, with a script that trains."""
    folder = tmp_path_factory.mktemp("ported") / "project"
    write_ported_project(folder)
    return folder


@pytest.fixture
def buckets(project: Path, s3_options: dict[str, Any]) -> Iterator[None]:
    """The buckets that pages name: one with checkpoints, and an empty one."""
    s3 = fsspec.filesystem("s3", **s3_options, skip_instance_cache=True)
    s3.mkdir("bucket")
    s3.put(str(project / "prefix"), "bucket/prefix", recursive=True)
    s3.mkdir("moons-checkpoints")
    yield
    for bucket in ("bucket", "moons-checkpoints"):
        s3.rm(bucket, recursive=True)


@pytest.fixture
def variables(warm_python: WarmPython, buckets: None, s3_options: dict[str, Any]) -> dict[str, str]:
    """The environment of commands: those of this Python first, S3 from the tests' server, one check of a trial."""
    programs = [str(warm_python.programs), str(Path(sys.executable).parent)]
    return environment(
        PATH=os.pathsep.join([*programs, os.environ["PATH"]]),
        AWS_ACCESS_KEY_ID=s3_options["key"],
        AWS_SECRET_ACCESS_KEY=s3_options["secret"],
        AWS_ENDPOINT_URL=s3_options["endpoint_url"],
        AWS_DEFAULT_REGION="us-east-1",
        PYTEST_ADDOPTS="-k trains -p no:cacheprovider",
    )


# The projects


#: A trial of Determined, as users have it before they port it.
TRIAL = (ROOT / "tests" / "testing" / "correct_trial.py").read_text()

CONST = """\
name: mnist
entrypoint: model_def:MyTrial
hyperparameters: {lr: 0.01, global_batch_size: 8}
searcher: {name: single, metric: validation_loss, max_length: {batches: 10}}
min_validation_period: {batches: 5}
resources: {slots_per_trial: 0}
"""
ADAPTIVE = """\
name: mnist-search
entrypoint: model_def:MyTrial
hyperparameters:
  global_batch_size: 8
  lr: {type: log, base: 10, minval: -4, maxval: -1}
searcher: {name: adaptive_asha, metric: validation_loss, max_trials: 2, time_metric: batches, max_time: 10}
min_validation_period: {batches: 5}
resources: {slots_per_trial: 0}
"""
TRAIN = """\
import det_lightning as det
from model_def import MyTrial

with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}) as context:
    det.pytorch.Trainer(MyTrial(context), context).fit(
        max_length=det.pytorch.Batch(10),
        checkpoint_period=det.pytorch.Batch(5),
        checkpoint_storage="checkpoints",
        latest_checkpoint="last",
    )
"""
TRAIN_SHARDED = """\
import det_lightning as det
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from model_def import MyTrial

strategy = PerModelFSDPStrategy(sharded_checkpoints=True)
with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}, strategy=strategy) as context:
    det.pytorch.Trainer(MyTrial(context), context).fit(max_length=det.pytorch.Batch(5), checkpoint_storage="sharded")
"""


def write_ported_project(folder: Path) -> None:
    """Write a project that uses det_lightning, and its training script."""
    folder.mkdir(parents=True)
    (folder / "model_def.py").write_text(TRIAL.replace("from determined ", "from det_lightning "))
    (folder / "train.py").write_text(TRAIN)
    (folder / "const.yaml").write_text(CONST)


def write_project(folder: Path) -> None:
    """Write a project that still uses Determined, with checkpoints that its trial has."""
    ported = folder / "ported"
    write_ported_project(ported)
    python = start_warm_python().executable
    subprocess.run([python, "train.py"], cwd=ported, env=environment(), check=True, timeout=600)
    (ported / "train_sharded.py").write_text(TRAIN_SHARDED)
    subprocess.run([python, *TORCHRUN, "train_sharded.py"], cwd=ported, env=environment(), check=True, timeout=600)
    (sharded,) = {path.parent for path in ported.glob("sharded/*/metadata.json")}
    shutil.move(sharded, folder / "SHARDED")
    shutil.move(ported / "checkpoints", folder)
    shutil.move(ported / "train.py", folder)
    shutil.rmtree(ported)
    (folder / "model_def.py").write_text(TRIAL)
    (folder / "const.yaml").write_text(CONST)
    (folder / "adaptive.yaml").write_text(ADAPTIVE)
    newest = max(path.parent for path in folder.glob("checkpoints/*/metadata.json"))
    shutil.copytree(newest, folder / "CHECKPOINT")
    # What Determined's master knew of a checkpoint.
    checkpoint_id = write_checkpoint(folder / "prefix", 10, by_determined=True).name
    (folder / "export").mkdir()
    write(folder / "export/experiment-3.json", [describe_experiment()])
    write(folder / "export/trial-7.json", describe_trial(7, {checkpoint_id: (10, 0.5)}))
