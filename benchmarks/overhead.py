"""CPU time that each system adds to a plain PyTorch loop, per batch, for the same small MLP.

    python benchmarks/overhead.py [--rounds 5] [--batches 3000] [--systems plain,determined,ours]

Each measurement is a process of its own; the systems take turns, so that a machine whose speed drifts slows down all
of them alike. What is timed is ``time.process_time`` from one batch, after a warm-up, to the last: all threads count.
Needs ``determined==0.38.1`` beside det_lightning for the systems of that name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from rounds import Stopwatch, measure_in_turn

WARM_UP = 300


def build(torch: Any) -> tuple[Any, Any, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    data = torch.utils.data.TensorDataset(torch.randn(8000, 64), torch.randint(0, 10, (8000,)))
    return model, data, torch.nn.functional.cross_entropy


def run_plain(watch: Stopwatch) -> None:
    import torch

    model, data, loss_of = build(torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    while True:
        for inputs, labels in loader:
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.tick()
            if watch.seen == watch.batches:
                return


def run_lightning(watch: Stopwatch, automatic: bool) -> None:
    import pytorch_lightning as pl
    import torch

    model, data, loss_of = build(torch)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, labels = batch
            loss = loss_of(self.model(inputs), labels)
            if not automatic:
                optimizer = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.tick()
            return loss if automatic else None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.01)

    trainer = pl.Trainer(**quiet_trainer_flags(), max_steps=watch.batches, max_epochs=-1)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))


def quiet_trainer_flags() -> dict[str, Any]:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {"accelerator": "cpu", "devices": 1, **dict.fromkeys(off, False)}


def trial_class(pytorch: Any, watch: Stopwatch) -> Any:
    import torch

    model, data, loss_of = build(torch)

    class Trial(pytorch.PyTorchTrial):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            self.context = context
            self.model = context.wrap_model(model)
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(data, batch_size=8, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(torch.utils.data.Subset(data, range(64)), batch_size=8)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            inputs, labels = batch
            loss = loss_of(self.model(inputs), labels)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            watch.tick()
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            inputs, labels = batch
            return {"validation_loss": loss_of(self.model(inputs), labels)}

    return Trial


def run_trainer(watch: Stopwatch, pytorch: Any, tensorboard: bool, **trainer_flags: Any) -> None:
    trial = trial_class(pytorch, watch)
    with pytorch.init(enable_tensorboard_logging=tensorboard) as context:
        trainer = pytorch.Trainer(trial(context), context, **trainer_flags)
        trainer.fit(max_length=pytorch.Batch(watch.batches), checkpoint_policy="none")


def run_determined(watch: Stopwatch, tensorboard: bool) -> None:
    from determined import pytorch

    run_trainer(watch, pytorch, tensorboard)


def run_ours(watch: Stopwatch, tensorboard: bool) -> None:
    from det_lightning import pytorch

    run_trainer(watch, pytorch, tensorboard, enable_progress_bar=False)


def run_lightning_api(watch: Stopwatch) -> None:
    import pytorch_lightning as pl

    from det_lightning import pytorch
    from det_lightning.adapters import TrialModule

    module = TrialModule(trial_class(pytorch, watch), reporting_period=pytorch.Batch(100))
    trainer = pl.Trainer(**quiet_trainer_flags(), max_steps=watch.batches, max_epochs=-1, limit_val_batches=0)
    trainer.fit(module)


RUNNERS: dict[str, Callable[[Stopwatch], None]] = {
    "plain": run_plain,
    "lightning_automatic": lambda watch: run_lightning(watch, automatic=True),
    "lightning_manual": lambda watch: run_lightning(watch, automatic=False),
    "determined": lambda watch: run_determined(watch, tensorboard=False),
    "ours": lambda watch: run_ours(watch, tensorboard=False),
    "ours_lightning_api": run_lightning_api,
    "determined_tensorboard": lambda watch: run_determined(watch, tensorboard=True),
    "ours_tensorboard": lambda watch: run_ours(watch, tensorboard=True),
}


def main() -> None:
    measured = measure_in_turn(RUNNERS, lambda batches: Stopwatch(batches, WARM_UP), __doc__, batches=3000)
    times = {system: [per_batch_us for per_batch_us, _ in figures] for system, figures in measured.items()}
    report(times, {system: max(peak_mib for _, peak_mib in figures) for system, figures in measured.items()})


def report(times: dict[str, list[float]], peaks: dict[str, float]) -> None:
    added = {
        system: [own - plain for own, plain in zip(own_times, times["plain"], strict=True)]
        for system, own_times in times.items()
    }
    print(f"{'microseconds of CPU a batch':28} {'median':>8} {'min':>8} {'max':>8} {'added':>8} {'MiB':>8}")
    for system, own_times in times.items():
        figures = (statistics.median(own_times), min(own_times), max(own_times), statistics.median(added[system]))
        print(f"{system:28} " + " ".join(f"{figure:8.1f}" for figure in figures) + f" {peaks[system]:8.0f}")
    for ours, peer in (
        ("ours", "determined"),
        ("ours_lightning_api", "determined"),
        ("ours_tensorboard", "determined_tensorboard"),
    ):
        if ours in added and peer in added:
            ratio = statistics.median(added[ours]) / statistics.median(added[peer])
            print(f"added by {ours} / added by {peer}: {ratio:.2f}")


if __name__ == "__main__":
    main()
