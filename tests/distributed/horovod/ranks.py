"""What the ranks run: scenarios, one after another, each writing its updates to a file.

python -m det_lightning.launch.horovod -np 2 -- python -m tests.distributed.horovod.ranks two OUTPUT
python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.distributed.horovod.ranks ddp OUTPUT
python -m tests.distributed.horovod.ranks one OUTPUT
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from tests.distributed.horovod import scenarios
from tests.distributed.ranks import BATCHES, GLOBAL_BATCH, Plain, save
from tests.distributed.ranks import train as train_by
from tests.trials import seed_everything

FREQUENCY, UNTIL = 3, 5

train = functools.partial(train_by, strategy=None)


def mean_loss(trial: Plain) -> float:
    with torch.no_grad():
        return float(torch.stack([trial.loss(batch) for batch in trial.make_loader()]).mean())


def all_scenarios(output: Path, name: str, rank: int) -> None:
    for scenario, (kind, frequency) in scenarios.SCENARIOS.items():
        trial = train(kind, output / f"{name}-{scenario}-storage", frequency=frequency)
        save(trial, output, f"{name}-{scenario}")
        if isinstance(trial, scenarios.Measured):
            torch.save({"error": float(trial.measured["error"])}, output / f"{name}-error-{rank}.pt")
        if isinstance(trial, scenarios.Unused):
            assert trial.hooks == len(trial.updates), "a hook after each step runs once"


def one(output: Path) -> None:
    all_scenarios(output, "one", 0)
    by_horovod = output / "for-others-storage"
    save(train(Plain, output / "elsewhere", batches=2 * BATCHES, latest_checkpoint=newest(by_horovod)), output, "on")


def newest(storage: Path) -> Path:
    return max(storage.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime_ns).parent


def two(output: Path) -> None:
    import horovod.torch as hvd
    import horovod.torch.optimizer as of_horovod

    hvd.init()
    rank = hvd.rank()
    all_scenarios(output, "two", rank)
    save(train(scenarios.Unequal, output / "unequal-storage"), output, "unequal")
    save(train(Plain, output / "compressed-storage", compresses=True), output, "compressed")
    for name, frequency in (("resumed", 1), ("resumed-aggregation", FREQUENCY)):
        storage = output / f"{name}-storage"
        train(Plain, storage, batches=UNTIL, frequency=frequency)
        save(train(Plain, storage, frequency=frequency, latest_checkpoint="last"), output, name)
    train(Plain, output / "for-others-storage", batches=UNTIL)

    exchanged = []
    allreduce = of_horovod.allreduce_async_

    def counting(*arguments: Any, **options: Any) -> Any:
        exchanged.append(options["name"])
        return allreduce(*arguments, **options)

    of_horovod.allreduce_async_ = counting
    train(Plain, output / "counted-storage", frequency=FREQUENCY)
    of_horovod.allreduce_async_ = allreduce
    torch.save(exchanged, output / f"exchanged-{rank}.pt")


def ddp(output: Path) -> None:
    dist.init_process_group("gloo")
    for scenario in ("plain", "aggregated", "clipped", "gan", "frozen"):
        kind, frequency = scenarios.SCENARIOS[scenario]
        storage = output / f"ddp-{scenario}-storage"
        save(train(kind, storage, frequency=frequency), output, f"ddp-{scenario}")
    by_horovod = newest(output / "for-others-storage")
    save(train(Plain, output / "elsewhere", latest_checkpoint=by_horovod), output, "ddp-from-horovod")
    train(Plain, output / "by-ddp-storage", batches=UNTIL)
    dist.barrier()
    dist.destroy_process_group()


def again(output: Path) -> None:
    trial = train(Plain, output / "elsewhere", latest_checkpoint=newest(output / "by-ddp-storage"))
    save(trial, output, "horovod-from-ddp")


def lightning(output: Path) -> None:
    settings: dict[str, Any] = {"max_length": pytorch.Batch(BATCHES), "reporting_period": pytorch.Batch(4)}
    module = TrialModule(scenarios.Clipped, {"global_batch_size": GLOBAL_BATCH}, **settings)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy="horovod", accelerator="cpu", enable_model_summary=False, **quiet)
    seed_everything()
    trainer.fit(module)
    rank, strategy = trainer.global_rank, trainer.strategy
    assert isinstance(module.trial, Plain)
    save(module.trial, output, "lightning", metrics=mean_loss(module.trial))
    trainer.save_checkpoint(output / "lightning.ckpt")
    with torch.inference_mode():
        own = torch.tensor([rank, 3])
        found = {
            "mean": strategy.reduce(own),
            "sum": strategy.reduce(own, reduce_op="sum"),
            "max": strategy.reduce(own.bfloat16(), reduce_op="max"),
            "any": strategy.reduce_boolean_decision(rank == 1, all=False),
            "all": strategy.reduce_boolean_decision(rank == 1),
            "gathered": strategy.all_gather(own),
            "scalars": strategy.all_gather(torch.tensor(rank)),
            "broadcast": strategy.broadcast({"of": rank} if rank == 0 else None),
        }
    strategy.barrier()
    torch.save(found, output / f"collectives-{rank}.pt")
    resumed = TrialModule(scenarios.Clipped, {"global_batch_size": GLOBAL_BATCH}, **settings)
    trainer = pl.Trainer(strategy="horovod", accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.validate(resumed, ckpt_path=str(output / "lightning.ckpt"), weights_only=False)
    assert isinstance(resumed.trial, Plain)
    resumed.trial.updates = module.trial.updates
    save(resumed.trial, output, "validated", metrics=mean_loss(resumed.trial))


def plain_module(output: Path) -> None:
    from pytorch_lightning.demos.boring_classes import BoringModel

    pl.Trainer(strategy="horovod", max_steps=2, accelerator="cpu", logger=False).fit(BoringModel())


def raises(output: Path) -> None:
    train(scenarios.Raises, output / "raises-storage")


def mixes(output: Path) -> None:
    train(scenarios.Mixing, output / "mixes-storage")


if __name__ == "__main__":
    command, folder = sys.argv[1], Path(sys.argv[2])
    known = {f.__name__: f for f in (one, two, ddp, again, lightning, plain_module, raises, mixes)}
    known[command](folder)
