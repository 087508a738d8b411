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

from det_lightning import InvalidHP, core, pytorch
from det_lightning.config import read_config
from det_lightning.core._task import TrialTask
from det_lightning.ranks.topology import free_port
from tests.trials import make_data

CONFIG = {
    "entrypoint": "model_def:Trial",
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 8}},
    "min_validation_period": {"batches": 4},
    "hyperparameters": {"global_batch_size": 8},
}


class GivesUp:
    """Raises InvalidHP at one place, on one rank."""

    def __init__(self, place: str, rank: int) -> None:
        self._place = place
        self._rank = rank

    def at(self, place: str, context: pytorch.PyTorchTrialContext) -> None:
        if place == self._place and context.distributed.rank == self._rank:
            raise InvalidHP(f"the culprit's message, {place}")


class Hooks(pytorch.PyTorchCallback):
    def __init__(self, gives_up: GivesUp, context: pytorch.PyTorchTrialContext) -> None:
        self._at = lambda place: gives_up.at(place, context)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._at("on_validation_end")

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self._at("on_checkpoint_save_start")

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._at("on_checkpoint_upload_end")


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, gives_up: GivesUp) -> None:
        self.context = context
        self.at = lambda place: gives_up.at(place, context)
        self.hooks = Hooks(gives_up, context)
        self.at("__init__")
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.at("between wraps")
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.sum = context.wrap_reducer(self.reduce, name="sum")

    def reduce(self, values: list[Any]) -> float:
        self.at("reducer")
        return float(len(values))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        self.at("build_training_data_loader")
        return pytorch.DataLoader(make_data(), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(make_data(), batch_size=8)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"hooks": self.hooks}

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            self.at("train_batch")
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.at("evaluate_batch")
        return {"validation_loss": self.loss(batch)}


def train(strategy: str, gives_up: GivesUp, rank: int, folder: Path, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    numbers: dict[str, Any] = {
        "rank": rank,
        "size": 2,
        "local_rank": rank,
        "local_size": 2,
        "cross_rank": 0,
        "cross_size": 1,
    }
    distributed = core.DistributedContext(**numbers, pub_port=port)
    with pytorch.init(distributed=distributed, strategy=strategy, enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(Trial(context, gives_up), context, enable_progress_bar=False)
        trainer.fit(checkpoint_policy="all")


class Case:
    """The two ranks of one trial, which run until :meth:`result` is asked for."""

    def __init__(self, strategy: str, gives_up: GivesUp) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(dir=".")).absolute()
        self._task = TrialTask(
            directory=folder, experiment_id=1, trial_id=1, run_id=1, trial_seed=1, hparams={"global_batch_size": 8},
            config=json.loads(read_config(CONFIG).model_dump_json()), slots=[0, 1],
            checkpoint_storage=str(folder / "checkpoints"),
        )  # fmt: skip
        self._task.write()
        port = free_port("127.0.0.1")
        self._ranks = [self._start(strategy, gives_up, rank, port) for rank in range(2)]

    def _start(self, strategy: str, gives_up: GivesUp, rank: int, port: int) -> int:
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
        cases[name] = Case(strategy, GivesUp(place, int(rank)))
    for name, case in cases.items():
        print(json.dumps({"case": name, **case.result()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
