"""CPU time that each system adds to a plain PyTorch loop, per batch, for the same small MLP in several variants.

    python benchmarks/overhead.py [--variants base,tensorboard] [--systems plain,determined,ours] [--blocks 20]
        [--launches 3] [--count]

All systems of a variant run at once, each in a process of its own and a block of batches at a time in turn; see
``relay.py``. A block of training holds one report, a block of validation one whole validation and the training batch
before it. ``--count`` counts the calls of functions, of Python and of C, in place of the time. Needs
``determined==0.38.1`` beside det_lightning for the system of that name.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from relay import Blocks, CallCounter, Stopwatch, Watch, run_blocks, run_in_turn
from variants import VALIDATION_BATCHES, VARIANTS, Task, Variant, trial_class

TRAINING_BLOCK = 100
WARM_UP_BLOCKS = 3
BLOCKS = 20
LAUNCHES = 3


def run_plain(task: Task, watch: Watch) -> None:
    if task.variant.validates:
        task.validate_plainly(watch)
    else:
        task.train_plainly(watch)


def run_lightning(task: Task, watch: Watch, automatic: bool) -> None:
    import pytorch_lightning as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = task.loss_of_batch(batch)
            if not automatic:
                optimizer: Any = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.tick()
            return loss if automatic else None

        def configure_optimizers(self) -> Any:
            return task.optimizers()

    trainer = pl.Trainer(**quiet_trainer_flags(), max_steps=watch.batches, max_epochs=-1)
    trainer.fit(Module(), torch.utils.data.DataLoader(task.data, batch_size=8, shuffle=True))


def quiet_trainer_flags() -> dict[str, Any]:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {"accelerator": "cpu", "devices": 1, **dict.fromkeys(off, False)}


def run_trainer(task: Task, watch: Watch, pytorch: Any, **trainer_flags: Any) -> None:
    trial = trial_class(pytorch, task, watch)
    with pytorch.init(
        enable_tensorboard_logging=task.variant.tensorboard, aggregation_frequency=task.variant.aggregation
    ) as context:
        trainer = pytorch.Trainer(trial(context), context, **trainer_flags)
        trainer.fit(checkpoint_policy="none", **length_and_period(task, watch, pytorch))


def length_and_period(task: Task, watch: Watch, pytorch: Any) -> dict[str, Any]:
    if task.variant.validates:
        validations = watch.batches // task.validation_batches
        return {"max_length": pytorch.Batch(validations), "validation_period": pytorch.Batch(1)}
    return {"max_length": pytorch.Batch(watch.batches)}


def run_determined(task: Task, watch: Watch) -> None:
    from determined import pytorch

    run_trainer(task, watch, pytorch)


def run_ours(task: Task, watch: Watch) -> None:
    from det_lightning import pytorch

    run_trainer(task, watch, pytorch, enable_progress_bar=False)


def run_lightning_api(task: Task, watch: Watch) -> None:
    import pytorch_lightning as pl

    from det_lightning import pytorch
    from det_lightning.adapters import TrialModule

    module = TrialModule(
        trial_class(pytorch, task, watch),
        aggregation_frequency=task.variant.aggregation,
        reporting_period=pytorch.Batch(100),
        **length_and_period(task, watch, pytorch),
    )
    pl.Trainer(**quiet_trainer_flags(), limit_val_batches=float(task.variant.validates)).fit(module)


RUNNERS: dict[str, Callable[[Task, Watch], None]] = {
    "plain": run_plain,
    "determined": run_determined,
    "ours": run_ours,
    "ours_lightning_api": run_lightning_api,
    "lightning_automatic": lambda task, watch: run_lightning(task, watch, automatic=True),
    "lightning_manual": lambda task, watch: run_lightning(task, watch, automatic=False),
}
COMPARED = ("plain", "determined", "ours", "ours_lightning_api")


def systems_of(variant: str) -> list[str]:
    """Return the systems that a variant is measured with."""
    if variant == "base":
        return list(RUNNERS)
    if variant == "tensorboard":
        return ["plain", "determined", "ours"]  # Lightning's API has Lightning's loggers
    return list(COMPARED)


def measure(variant: str, systems: list[str], blocks: int, launches: int, count: bool) -> dict[str, Blocks]:
    options = ["--variant", variant, *(["--count"] if count else [])]
    return run_in_turn(__file__, systems, 1 if count else blocks, 1 if count else launches, options)


def figures(short: bool = False) -> dict[str, float]:
    """Return the main figures; a ``short`` run only counts calls, of the most important variants."""
    found: dict[str, float] = {}
    for variant in ("base", "tensorboard", "validation") if short else VARIANTS:
        systems = [system for system in systems_of(variant) if system in COMPARED]
        for count in (True,) if short else (True, False):
            measured = measure(variant, systems, BLOCKS, LAUNCHES, count)
            plain, determined = measured.pop("plain"), measured.pop("determined")
            for system, blocks in measured.items():
                ratio = blocks.added_to(plain) / determined.added_to(plain)
                found[f"{variant}/{system}/{'calls' if count else 'cpu'}"] = round(ratio, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--systems", default=",".join(RUNNERS))
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=RUNNERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run_one(arguments.one, VARIANTS[arguments.variant], arguments.blocks, arguments.count)
        return
    for variant in arguments.variants.split(","):
        systems = [system for system in systems_of(variant) if system in arguments.systems.split(",")]
        measured = measure(variant, systems, arguments.blocks, arguments.launches, arguments.count)
        report(f"{variant}: {VARIANTS[variant].title}", "calls" if arguments.count else "microseconds of CPU", measured)


def run_one(system: str, variant: Variant, blocks: int, count: bool) -> None:
    length = VALIDATION_BATCHES if variant.validates else TRAINING_BLOCK
    warm_up = WARM_UP_BLOCKS * length
    watch = CallCounter(warm_up, 2 * length) if count else Stopwatch(warm_up, blocks, length)
    run_blocks(lambda watch: RUNNERS[system](Task(variant), watch), watch)


def report(title: str, unit: str, measured: dict[str, Blocks]) -> None:
    plain = measured["plain"]
    added = {system: blocks.added_to(plain) for system, blocks in measured.items()}
    print(f"\n{title}\n{unit + ' a batch':28} {'median':>8} {'min':>8} {'added':>8} {'ratio':>8} {'MiB':>8}")
    for system, blocks in measured.items():
        ratio = added[system] / added["determined"] if "determined" in added else float("nan")
        row = (statistics.median(blocks.per_batch), min(blocks.per_batch), added[system])
        numbers = " ".join(f"{figure:8.1f}" for figure in row)
        print(f"{system:28} {numbers} {ratio:8.2f} {blocks.peak_mib:8.0f}", flush=True)


if __name__ == "__main__":
    main()
