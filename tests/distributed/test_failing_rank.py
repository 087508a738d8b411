"""An exception on one rank ends all of them, soon, and with its message; after InvalidHP they end well."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from det_lightning import InvalidHP, pytorch
from det_lightning.config import read_config
from det_lightning.core._task import TrialTask
from det_lightning.ranks.topology import free_port
from tests.conformance.trials import callback
from tests.distributed.ranks import Plain
from tests.launching import TORCHRUN, Ended, start, wait
from tests.ranks.ranks import ends_of, meet, start_forked
from tests.versions import needs_shards

pytestmark = pytest.mark.slow

#: Starting takes its time too.
START_S = 120  # for several processes that import torch, on a busy machine
END_S = 30

#: Trainings that end at batch 5: by which launcher, by which Trainer, how, and on which rank.
TRAININGS: dict[str, tuple[list[str], str, str, int]] = {
    "determined": (TORCHRUN, "determined", "error", 1),
    "torchrun": (TORCHRUN, "lightning", "error", 1),
    "killed": (TORCHRUN, "determined", "sigkill", 1),
    "lightning": ([], "lightning", "error", 1),
    "main process": ([], "lightning", "error", 0),
    "gave up": (TORCHRUN, "determined", "invalid-hp", 1),
    "gave up in lightning": ([], "lightning", "invalid-hp", 1),
}


def end(folder: Path, names: list[str]) -> dict[str, Ended]:
    """Return how trainings have ended that run at once; their output ends when the last process has."""
    started = {}
    for name in names:
        launcher, trainer, how, rank = TRAININGS[name]
        arguments = ["--trainer", trainer, "--end", how, "--at", "5", "--rank", str(rank)]
        started[name] = start(folder / name, *arguments, launcher=launcher)
    return {name: wait(process, START_S + END_S) for name, process in started.items()}


def test_an_exception_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """Under Lightning's own launcher an InvalidHP leaves ``fit``."""
    for name, ended in end(tmp_path, ["lightning", "main process", "gave up", "gave up in lightning"]).items():
        if name != "gave up in lightning":  # the lost connection ends the other rank, or the watch does
            assert (ended.status == 0) is (name == "gave up"), ended.output
        assert "the culprit's message" in ended.output


def test_torchrun_names_the_first_failure(tmp_path: Path) -> None:
    """The other rank fails too, because of it, in a collective or in an exchange of objects."""
    for name, ended in end(tmp_path, ["determined", "torchrun", "killed"]).items():
        assert ended.status != 0, ended.output
        _, report = ended.output.split("Root Cause (first observed failure):")
        assert re.findall(r" rank +: (\d)", report) == ["1"], ended.output
        assert ("Signal 9" if name == "killed" else "ValueError: the culprit's message") in report


class GivesUp(Plain):
    """Raises InvalidHP at one place, on one rank."""

    def __init__(self, context: pytorch.PyTorchTrialContext, gives_up: tuple[int, str]) -> None:
        self.gives_up = gives_up
        super().__init__(context)

    def at(self, place: str) -> None:
        if (self.context.distributed.rank, place) == self.gives_up:
            raise InvalidHP(f"the culprit's message, {place}")

    def wrap(self) -> None:
        self.at("__init__")
        super().wrap()
        self.context.wrap_reducer(self.reduce, name="sum")

    def reduce(self, values: list[Any]) -> float:
        self.at("reducer")
        return float(len(values))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        hook = "on_checkpoint_upload_end"
        return {"hooks": callback(pytorch, **{hook: lambda uuid: self.at(hook)})}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            self.at("train_batch")
        return {"loss": self.train_on(batch)}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.at("evaluate_batch")
        return super().evaluate_batch(batch)


CONFIG = {
    "entrypoint": "model_def:Trial",
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 8}},
    "min_validation_period": {"batches": 4},
    "hyperparameters": {"global_batch_size": 8},
}


def train(rank: int, strategy: str, gives_up: tuple[int, str], task: TrialTask, port: int) -> None:
    """Train as a rank of a trial of an experiment; keep what it prints, and why it ends."""
    os.environ["DET_LIGHTNING_TASK"] = str(task.file)
    output = (task.directory / f"output-{rank}").open("w", buffering=1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    logging.getLogger().handlers = [logging.StreamHandler(output)]
    dist.init_process_group("gloo", init_method=f"file://{task.directory}/meeting", rank=rank, world_size=2)
    with pytorch.init(distributed=meet(rank, port), strategy=strategy, enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(GivesUp(context, gives_up), context, enable_progress_bar=False)
        trainer.fit(checkpoint_policy="all")


def start_trial(strategy: str, gives_up: tuple[int, str]) -> tuple[TrialTask, list[Any]]:
    """Start the two ranks of a trial of an experiment."""
    folder = Path(tempfile.mkdtemp(dir=".")).absolute()
    config = json.loads(read_config(CONFIG).model_dump_json())
    hparams, storage = {"global_batch_size": 8}, str(folder / "checkpoints")
    task = TrialTask(folder, 1, 1, 1, 1, hparams=hparams, config=config, slots=[0, 1], checkpoint_storage=storage)
    task.write()
    return task, start_forked(2, train, strategy, gives_up, task, free_port())


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("trial_ddp", [(1, "__init__"), (0, "train_batch"), (1, "reducer"), (1, "on_checkpoint_upload_end")]),
        pytest.param("trial_fsdp", [(1, "train_batch"), (0, "evaluate_batch")], marks=needs_shards),
    ],
)
def test_whichever_rank_gives_up_all_end_well(strategy: str, places: list[tuple[int, str]]) -> None:
    """It is reported to the experiment, wherever it is raised."""
    for task, processes in [start_trial(strategy, gives_up) for gives_up in places]:
        ends = ends_of(processes, START_S)
        outputs = [(task.directory / f"output-{rank}").read_text() for rank in range(2)]
        assert ends == [0, 0], outputs
        records = [json.loads(line) for line in task.metrics_file.read_text().splitlines()]
        reports = [record["metrics"]["reason"] for record in records if record["group"] == "early_exit"]
        assert reports == ["INVALID_HP"], outputs
        assert all("the culprit's message" in output for output in outputs)
