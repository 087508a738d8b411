"""What the ranks of tests/precision/test_precision_ranks.py run: each level and strategy, with losses that overflow.

torchrun --nproc-per-node 2 -m tests.precision.precision_ranks OUTPUT
torchrun --nproc-per-node 1 -m tests.precision.precision_ranks OUTPUT
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from det_lightning import errors, pytorch
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from tests.distributed.ranks import Plain, context_of, fit, whole
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


def train_normed(strategy: Any, storage: Path) -> dict[str, Any]:
    """Train with a batch norm in float32, and leave a checkpoint."""
    trial = train(strategy, {"opt_level": "O2"}, 1, storage, checkpoint_policy="all", kind=Normed)
    return {"types": {str(parameter.dtype) for parameter in trial.model.parameters()}, **outcome_of(trial)}


def resume(output: Path, name: str) -> Leveled:
    """Train a scenario to the middle of an aggregation, and resume."""
    strategy, level, frequency = SCENARIOS[name]
    storage = output / f"{name}-stopped"
    train(strategy, level, frequency, storage, max_length=pytorch.Batch(5))
    return train(strategy, level, frequency, storage, latest_checkpoint="last")


def list_runs(output: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each run, and the function that runs it."""
    size = dist.get_world_size()
    for name, (strategy, level, frequency) in SCENARIOS.items():
        yield name, lambda: outcome_of(train(strategy, level, frequency, output / f"{name}-{size}"))  # noqa: B023
    if size == 1:
        return
    for name in RESUMED:
        yield f"{name}-resumed", lambda: outcome_of(resume(output, name))  # noqa: B023
    for strategy in STRATEGIES:
        yield f"bf16-mixed-{strategy}", lambda: through_lightning(strategy)  # noqa: B023
    if SHARDS:
        for kind in (Normed, Hasty):
            yield f"refusal-{kind.__name__}", lambda: refusal(kind)  # noqa: B023
        sharded = PerModelFSDPStrategy(policy=[torch.nn.BatchNorm1d])
        yield "normed-sharded", lambda: train_normed(sharded, output / "sharded")
        yield "normed-replicated", lambda: train_normed("trial_ddp", output / "replicated")


def main(output: Path) -> None:
    """Keep what each run leaves behind, or why it failed; the others go on."""
    for name, run in list_runs(output):
        left = output / f"{name}-{dist.get_world_size()}-{dist.get_rank()}"
        try:
            torch.save(run(), f"{left}.pt")
        except Exception:
            Path(f"{left}.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
