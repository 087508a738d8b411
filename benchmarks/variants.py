"""The same small training in several variants, as a plain loop and as a trial of either package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from relay import Watch

__all__ = ["VALIDATION_BATCHES", "VARIANTS", "Task", "Variant", "trial_class"]

#: Number of batches of a validation, unless a task has another one.
VALIDATION_BATCHES = 250

_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """What distinguishes a training from the simplest: a small MLP, SGD, batches of two tensors, one metric."""

    title: str
    aggregation: int = 1
    optimizers: int = 1
    scheduler: bool = False
    reducer: bool = False
    nested: bool = False
    tensorboard: bool = False
    validates: bool = False


VARIANTS = {
    "base": Variant("one model, one optimizer"),
    "tensorboard": Variant("TensorBoard files", tensorboard=True),
    "validation": Variant("validation batches", validates=True),
    "aggregation": Variant("gradients of 4 batches for an update", aggregation=4),
    "optimizers": Variant("three optimizers", optimizers=3),
    "scheduler": Variant("a scheduler that steps after each batch", scheduler=True),
    "reducer": Variant("a reducer of the trial's own", reducer=True),
    "nested": Variant("batches of nested dicts and lists", nested=True),
}


class Task:
    """Model, data and loss of a variant, alike for all systems."""

    def __init__(self, variant: Variant, validation_batches: int = VALIDATION_BATCHES) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.variant = variant
        self.validation_batches = validation_batches
        layers = (torch.nn.Linear(64, 128), torch.nn.Linear(128, 128), torch.nn.Linear(128, 10))
        self.model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        self._layers = layers
        inputs, labels = torch.randn(8000, 64), torch.randint(0, 10, (8000,))
        data: Any = torch.utils.data.TensorDataset(inputs, labels)
        self.data: Any = _Nested(data) if variant.nested else data
        self.validation_data: Any = torch.utils.data.Subset(self.data, range(validation_batches * _BATCH_SIZE))
        self.loss_of_batch: Callable[[Any], torch.Tensor] = self._nested_loss if variant.nested else self._loss

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.model(inputs), labels)

    def _nested_loss(self, batch: Any) -> torch.Tensor:
        left, right = batch["inputs"]["halves"]
        return torch.nn.functional.cross_entropy(self.model(torch.cat([left, right], 1)), batch["labels"][0])

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return new optimizers, each for its share of the layers."""
        count = self.variant.optimizers
        shares = [torch.nn.ModuleList(self._layers[index::count]) for index in range(count)]
        return [torch.optim.SGD(share.parameters(), lr=0.01) for share in shares]

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a new scheduler."""
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)

    def train_plainly(self, watch: Watch) -> None:
        """Train in a plain loop, as one would write it for this variant."""
        variant = self.variant
        optimizers = self.optimizers()
        scheduler = self.scheduler(optimizers[0]) if variant.scheduler else None
        seen: list[float] | None = [] if variant.reducer else None
        for number, batch in enumerate(self._endless(), start=1):
            loss = self.loss_of_batch(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            if variant.aggregation == 1 or number % variant.aggregation == 0:
                for optimizer in optimizers:
                    if variant.aggregation > 1:
                        _divide(optimizer, variant.aggregation)
                    optimizer.step()
                    optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            if seen is not None:
                seen.append(loss.item())
            watch.tick()
            if watch.seen == watch.batches:
                return

    def _endless(self) -> Iterator[Any]:
        loader = torch.utils.data.DataLoader(self.data, batch_size=_BATCH_SIZE, shuffle=True)
        while True:
            yield from loader

    def validate_plainly(self, watch: Watch) -> None:
        """Validate again and again in a plain loop, with a training batch before each validation."""
        (optimizer,) = self.optimizers()
        batches = self._endless()
        loader = torch.utils.data.DataLoader(self.validation_data, batch_size=_BATCH_SIZE)
        while watch.seen < watch.batches:
            self.loss_of_batch(next(batches)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            self.model.eval()
            losses = []
            with torch.no_grad():
                for batch in loader:
                    losses.append(self.loss_of_batch(batch))
                    watch.tick()
            torch.stack(losses).mean().item()
            self.model.train()


class _Nested(torch.utils.data.Dataset[Any]):
    def __init__(self, flat: torch.utils.data.TensorDataset) -> None:
        self._flat = flat

    def __len__(self) -> int:
        return len(self._flat)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self._flat[index]
        return {"inputs": {"halves": [inputs[:32], inputs[32:]]}, "labels": (label,)}


def _divide(optimizer: torch.optim.Optimizer, divisor: int) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.div_(divisor)


def trial_class(pytorch: Any, task: Task, watch: Watch) -> Any:
    """Return the trial of a task, for the package ``determined.pytorch`` or ``det_lightning.pytorch``."""
    variant = task.variant
    trains = (lambda: None) if variant.validates else watch.tick
    validates = watch.tick if variant.validates else (lambda: None)

    class Losses(pytorch.MetricReducer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.losses: list[float] = []

        def update(self, loss: torch.Tensor) -> None:
            self.losses.append(loss.item())

        def per_slot_reduce(self) -> Any:
            return sum(self.losses), len(self.losses)

        def cross_slot_reduce(self, per_slot: Any) -> Any:
            return sum(total for total, _ in per_slot) / max(1, sum(count for _, count in per_slot))

    class Trial(pytorch.PyTorchTrial):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            self.context = context
            task.model = context.wrap_model(task.model)
            self.optimizers = [context.wrap_optimizer(optimizer) for optimizer in task.optimizers()]
            if variant.scheduler:
                mode = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
                context.wrap_lr_scheduler(task.scheduler(self.optimizers[0]), mode)
            self.losses = context.wrap_reducer(Losses(), name="mean_loss") if variant.reducer else None

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(task.data, batch_size=_BATCH_SIZE, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(task.validation_data, batch_size=_BATCH_SIZE)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = task.loss_of_batch(batch)
            self.context.backward(loss)
            for optimizer in self.optimizers:
                self.context.step_optimizer(optimizer)
            if self.losses is not None:
                self.losses.update(loss)
            trains()
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            loss = task.loss_of_batch(batch)
            validates()
            return {"validation_loss": loss}

    return Trial
