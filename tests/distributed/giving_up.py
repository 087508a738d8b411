"""Two ranks of a trial of an experiment, of which one gives up on the hyperparameters, in several cases at once.

python tests/distributed/giving_up.py STRATEGY RANK:PLACE ...

Prints a line of JSON for each case: the statuses of the ranks, and what they reported to the experiment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from det_lightning import InvalidHP, pytorch
from det_lightning.config import read_config
from det_lightning.core._task import TrialTask
from det_lightning.ranks.topology import free_port
from tests.conformance.trials import callback
from tests.distributed.trials import Plain
from tests.ranks.ranks import meet

CONFIG = {
    "entrypoint": "model_def:Trial",
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 8}},
    "min_validation_period": {"batches": 4},
    "hyperparameters": {"global_batch_size": 8},
}


class GivesUp(Plain):
    """Raises InvalidHP at one place, on one rank."""

    def __init__(self, context: pytorch.PyTorchTrialContext, rank: int, place: str) -> None:
        self.rank = rank
        self.place = place
        super().__init__(context)

    def at(self, place: str) -> None:
        if (place, self.context.distributed.rank) == (self.place, self.rank):
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


def train(strategy: str, case: tuple[int, str], rank: int, folder: Path, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    with pytorch.init(distributed=meet(rank, port), strategy=strategy, enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(GivesUp(context, *case), context, enable_progress_bar=False)
        trainer.fit(checkpoint_policy="all")


class Case:
    """The two ranks of one trial, which run until :meth:`result` is asked for."""

    def __init__(self, strategy: str, gives_up: tuple[int, str]) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(dir=".")).absolute()
        self._task = TrialTask(
            directory=folder, experiment_id=1, trial_id=1, run_id=1, trial_seed=1, hparams={"global_batch_size": 8},
            config=json.loads(read_config(CONFIG).model_dump_json()), slots=[0, 1],
            checkpoint_storage=str(folder / "checkpoints"),
        )  # fmt: skip
        self._task.write()
        port = free_port("127.0.0.1")
        self._ranks = [self._start(strategy, gives_up, rank, port) for rank in range(2)]

    def _start(self, strategy: str, gives_up: tuple[int, str], rank: int, port: int) -> int:
        if child := os.fork():
            return child
        os.environ["DET_LIGHTNING_TASK"] = str(self._task.file)
        output = os.open(self._folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        train(strategy, gives_up, rank, self._folder, port)
        sys.exit(0)

    def result(self) -> dict[str, Any]:
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self._ranks]
        file = self._task.metrics_file
        records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        reports = [record["metrics"]["reason"] for record in records if record["group"] == "early_exit"]
        outputs = [(self._folder / f"output-{rank}").read_text() for rank in range(2)]
        return {"statuses": statuses, "reports": reports, "outputs": outputs}


def main(strategy: str, *names: str) -> None:
    torch.set_num_threads(1)
    cases = {}
    for name in names:
        rank, place = name.split(":")
        cases[name] = Case(strategy, (int(rank), place))
    for name, case in cases.items():
        print(json.dumps({"case": name, **case.result()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
