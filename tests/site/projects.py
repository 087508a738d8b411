"""What the commands of a page begin with: a small project, its checkpoints, and a bucket."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.cli.exported import describe_experiment, describe_trial, write
from tests.launching import ROOT, TORCHRUN, environment
from tests.warm_python import start_warm_python

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
    write_export(folder / "export", write_checkpoint(folder / "prefix", 10, by_determined=True).name)


def write_export(folder: Path, checkpoint_id: str) -> None:
    """Write what Determined's master knew of a checkpoint."""
    folder.mkdir()
    write(folder / "experiment-3.json", [describe_experiment()])
    write(folder / "trial-7.json", describe_trial(7, {checkpoint_id: (10, 0.5)}))
