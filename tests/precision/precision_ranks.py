"""What the ranks of tests/precision/test_precision_ranks.py run: each level and strategy, with losses that overflow.

torchrun --nproc-per-node 2 -m tests.precision.precision_ranks OUTPUT
torchrun --nproc-per-node 1 -m tests.precision.precision_ranks OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from det_lightning import errors, pytorch
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from tests.distributed.ranks import context_of, fit
from tests.distributed.trials import Plain, whole
from tests.versions import SHARDS

#: The batches of which one rank's loss is infinite.
OVERFLOWS = (1, 4)
SCENARIOS = {
    "O1": ("trial_ddp", {"opt_level": "O1"}, 1),
    "O2": ("trial_ddp", {"opt_level": "O2"}, 1),
    "O2-aggregated": ("trial_ddp", {"opt_level": "O2"}, 3),
    "O3": ("trial_ddp", {"opt_level": "O3", "loss_scale": "dynamic"}, 1),
}
if SHARDS:
    SCENARIOS |= {
        "O1-sharded-aggregated": ("trial_fsdp", {"opt_level": "O1"}, 3),
        "O2-sharded": ("trial_fsdp", {"opt_level": "O2"}, 1),
        "O2-sharded-aggregated": ("trial_fsdp", {"opt_level": "O2"}, 3),
        "O3-sharded": ("trial_fsdp", {"opt_level": "O3", "loss_scale": "dynamic"}, 1),
    }
#: Those that are stopped within an aggregation, too.
RESUMED = [name for name in ("O2-aggregated", "O2-sharded-aggregated") if name in SCENARIOS]
STRATEGIES = ["trial_ddp", "trial_fsdp"] if SHARDS else ["trial_ddp"]


class Leveled(Plain):
    """The deterministic trial under a level; the last rank's loss overflows now and then."""

    def __init__(self, context: pytorch.PyTorchTrialContext, level: dict[str, Any]) -> None:
        self.level = level
        super().__init__(context)

    def wrap(self) -> None:
        super().wrap()
        self.model, self.optimizer = self.context.configure_apex_amp(self.model, self.optimizer, **self.level)

    def train_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        distributed = self.context.distributed
        last = distributed.rank == distributed.size - 1
        overflows = last and self.context.current_train_batch() in OVERFLOWS
        self.context.backward(loss * (float("inf") if overflows else 1.0))
        clips = lambda p: torch.nn.utils.clip_grad_norm_(p, 5.0)  # noqa: E731
        self.context.step_optimizer(self.optimizer, clip_grads=clips)
        return loss

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.train_on(batch)
        if self.context.is_update_batch():
            self.updates.append(torch.cat([whole(p).reshape(-1) for p in self.model.parameters()]))
        return {"loss": loss}


def train(
    strategy: Any, level: dict[str, Any], frequency: int, storage: Path, *, kind: type[Leveled] = Leveled, **more: Any
) -> Leveled:
    with context_of(strategy, frequency) as context:
        trial = kind(context, level)
        arguments = {"checkpoint_policy": "none", "max_length": pytorch.Batch(12), **more}
        pytorch.Trainer(trial, context, enable_progress_bar=False).fit(checkpoint_storage=storage, **arguments)
        return trial


def outcome_of(trial: Leveled) -> dict[str, Any]:
    return {"updates": trial.updates, **trial.context.precision.scaling.state_dict()}


def through_lightning(strategy: str) -> dict[str, Any]:
    """Train the trial without a level of its own, in the precision that ``pl.Trainer`` asks for."""

    class Plainly(Leveled):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            Plain.__init__(self, context)

        wrap = Plain.wrap
        train_on = Plain.train_on

    return {"updates": fit(Plainly, strategy, precision="bf16-mixed").trial.updates}


class Normed(Leveled):
    """Has a batch norm between its layers."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))


class Hasty(Leveled):
    """Runs its model before the weights are cast."""

    def wrap(self) -> None:
        self.context.wrap_model(model := self.make_model())(torch.zeros(2, 4))
        optimizer = self.context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.context.configure_apex_amp(model, optimizer, **self.level)


def refusal(kind: type[Leveled]) -> str:
    """Return why sharded weights cannot be cast."""
    try:
        train("trial_fsdp", {"opt_level": "O2"}, 1, Path("unused"), kind=kind)
    except errors.InvalidExperimentException as e:
        return str(e)
    return "nothing was refused"


def normed(output: Path, rank: int) -> None:
    """Train with a batch norm in float32, sharded and not; the sharded one leaves a checkpoint, too."""
    sharded = PerModelFSDPStrategy(policy=[torch.nn.BatchNorm1d])
    for name, strategy in (("sharded", sharded), ("replicated", "trial_ddp")):
        trial = train(strategy, {"opt_level": "O2"}, 1, output / name, checkpoint_policy="all", kind=Normed)
        types = {str(parameter.dtype) for parameter in trial.model.parameters()}
        torch.save({"types": types, **outcome_of(trial)}, output / f"normed-{name}-{rank}.pt")


def main(output: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, (strategy, level, frequency) in SCENARIOS.items():
        storage = output / f"{name}-{size}"
        trial = train(strategy, level, frequency, storage)
        torch.save(outcome_of(trial), output / f"{name}-{size}-{rank}.pt")
    if size > 1:
        for name in RESUMED:
            strategy, level, frequency = SCENARIOS[name]
            storage = output / f"{name}-resumed"
            train(strategy, level, frequency, storage, max_length=pytorch.Batch(5))
            resumed = train(strategy, level, frequency, storage, latest_checkpoint="last")
            torch.save(outcome_of(resumed), output / f"{name}-resumed-{size}-{rank}.pt")
        for strategy in STRATEGIES:
            torch.save(through_lightning(strategy), output / f"bf16-mixed-{strategy}-{size}-{rank}.pt")
        if SHARDS:
            for kind in (Normed, Hasty):
                (output / f"refusal-{kind.__name__}-{rank}.txt").write_text(refusal(kind))
            normed(output, rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
