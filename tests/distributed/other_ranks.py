"""Trainings that go on with other numbers of ranks; the chief writes the samples and the weights of each to a file.

torchrun --nproc-per-node N -m tests.distributed.other_ranks FOLDER RUN BATCHES [RUN BATCHES ...]
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, TensorDataset

from det_lightning import core, pytorch
from det_lightning.pytorch import samplers
from tests.trials import seed_everything

GLOBAL_BATCH = 12


class Regression(pytorch.PyTorchTrial):
    """Fits a line, with momentum and a schedule by batches; remembers the samples of each batch."""

    size, frequency = 96, 1
    loader: ClassVar[dict[str, Any]] = {"shuffle": True}

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.seen: list[tuple[int, list[int]]] = []
        torch.manual_seed(0)
        self.model = context.wrap_model(torch.nn.Linear(3, 1).double())
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.optimizer = context.wrap_optimizer(sgd)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.5)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        torch.manual_seed(7)

    def make_batches(self, data: Any, batch_size: int) -> dict[str, Any]:
        return {"batch_size": batch_size, **self.loader}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.randn(self.size, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(self.size))
        return pytorch.DataLoader(data, **self.make_batches(data, self.context.get_per_slot_batch_size()))

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.zeros(4)), batch_size=1)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append((batch_idx, batch[2].tolist()))
        loss = ((self.model(batch[0]) - batch[1]) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"zero": 0.0}


class Aggregating(Regression):
    frequency = 4


class Partial(Regression):
    """A pass ends with a batch of four samples."""

    size = 100


class Dropping(Regression):
    """On two ranks a pass is four batches and a half, so that epochs do not begin with a pass."""

    size = 57
    loader: ClassVar[dict[str, Any]] = {"shuffle": True, "drop_last": True}


class Prefetching(Regression):
    """A worker draws samples ahead of the training, from a generator of the loader's own."""

    def make_batches(self, data: Any, batch_size: int) -> dict[str, Any]:
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        workers = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
        return {"batch_size": batch_size, "sampler": sampler, **workers}


class Reproducible(Regression):
    """Shuffles the samples, then the batches, which have other sizes on other numbers of ranks."""

    def make_batches(self, data: Any, batch_size: int) -> dict[str, Any]:
        shuffled = samplers.ReproducibleShuffleSampler(SequentialSampler(data), seed=5)
        batches = BatchSampler(shuffled, batch_size, drop_last=False)
        return {"batch_sampler": samplers.ReproducibleShuffleBatchSampler(batches, seed=5)}


class OwnBatches(Regression):
    """Makes batches in a class of its own."""

    class Batches(BatchSampler):
        pass

    def make_batches(self, data: Any, batch_size: int) -> dict[str, Any]:
        return {"batch_sampler": self.Batches(RandomSampler(data), batch_size, drop_last=False)}


class FixedShares(Regression):
    """Trains on six samples in each process, so that a batch of all processes depends on their number."""

    def make_batches(self, data: Any, batch_size: int) -> dict[str, Any]:
        return {"batch_size": 6, "shuffle": True}


TRIALS = {
    kind.__name__: kind
    for kind in (Regression, Aggregating, Partial, Dropping, Prefetching, Reproducible, OwnBatches, FixedShares)
}


class Notices(logging.Handler):
    """Keeps the warnings about resumed batches."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        for name in ("engine.data_stream", "pytorch._position"):
            logging.getLogger(f"det_lightning.{name}").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(folder: Path, name: str, run: str, batches: int) -> None:
    """Train a trial on up to ``batches`` batches; ``run`` names its checkpoints, from which it resumes."""
    kind = TRIALS[name]
    notices = Notices()
    seed_everything()
    with pytorch.init(
        hparams={"global_batch_size": GLOBAL_BATCH},
        distributed=core.DistributedContext.from_torch_distributed(),
        aggregation_frequency=kind.frequency,
        enable_tensorboard_logging=False,
    ) as context:
        trial = kind(context)
        pytorch.Trainer(trial, context, enable_progress_bar=False).fit(
            max_length=pytorch.Batch(batches),
            validation_period=pytorch.Batch(4),
            checkpoint_storage=folder / f"{name}-{run}",
            checkpoint_policy="none",
            latest_checkpoint="last",
        )
        seen: dict[int, list[int]] = {}
        for index, samples in (one for of_rank in context.distributed.allgather(trial.seen) for one in of_rank):
            seen.setdefault(index, []).extend(samples)
        found = {
            "seen": {index: sorted(samples) for index, samples in seen.items()},
            "weights": [p.tolist() for p in trial.model.parameters()],
            "notices": [*itertools.chain.from_iterable(context.distributed.allgather(notices.texts))],
        }
        if context.distributed.rank == 0:
            (folder / f"{name}-{run}-{batches}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for run, batches in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        for name in TRIALS:
            train(Path(sys.argv[1]), name, run, int(batches))
