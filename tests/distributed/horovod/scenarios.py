"""Trials that are trained by Horovod, by DDP and by one process, and compared."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics

from det_lightning import pytorch
from tests.conformance.trials import callback
from tests.distributed.ranks import Frozen, Gan, Orders, Plain


class Clipped(Plain):
    """With a schedule too."""

    def wrap(self) -> None:
        super().wrap()
        step_lr = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.context.wrap_lr_scheduler(step_lr, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def train_on(self, batch: Any) -> torch.Tensor:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1))
        return loss


class Leaking(Gan):
    """The critic gets gradients of the other loss, and throws them away."""

    def train_on(self, batch: Any) -> torch.Tensor:
        self.critics.zero_grad(set_to_none=True)
        fake = self.model(batch[0])
        self.context.backward((self.critic(fake.detach()) ** 2).mean() - self.critic(batch[0]).mean())
        self.context.step_optimizer(self.critics)
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return loss


class Mixing(Gan):
    """The critic adds up the gradients of both losses, which Horovod has not been told of."""

    passes = 1

    def wrap(self) -> None:
        self.model = self.context.wrap_model(torch.nn.Linear(4, 4))
        self.critic = self.context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = self.context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.05))
        adamw = torch.optim.AdamW(self.critic.parameters(), 0.05)
        self.critics = self.context.wrap_optimizer(adamw, backward_passes_per_step=self.passes)

    def train_on(self, batch: Any) -> torch.Tensor:
        fake = self.model(batch[0])
        self.context.backward((self.critic(fake.detach()) ** 2).mean() - self.critic(batch[0]).mean())
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.critics)
        self.context.step_optimizer(self.optimizer)
        return loss


class Adding(Mixing):
    """It has."""

    passes = 2


class Passes(Orders):
    """Three backward passes before each step."""

    def wrap(self) -> None:
        self.model = self.context.wrap_model(self.make_model())
        adamw = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.optimizer = self.context.wrap_optimizer(adamw, backward_passes_per_step=3)


class Unused(Plain):
    """A layer that only every third batch uses: weight decay and momentum have to rest on the others."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.ModuleDict({"all": torch.nn.Linear(4, 1), "some": torch.nn.Linear(4, 1)})

    def wrap(self) -> None:
        super().wrap()
        self.hooks = 0
        self.optimizer.register_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.hooks += 1

    def loss(self, batch: Any) -> torch.Tensor:
        layers: Any = self.model
        outputs = layers["all"](batch[0])
        if len(self.updates) % 3 == 0:
            outputs = outputs + layers["some"](batch[0])
        return ((outputs - batch[1]) ** 2).mean()


class Measured(Plain):
    """A torchmetrics metric, over all ranks."""

    def wrap(self) -> None:
        super().wrap()
        self.error = self.context.wrap_reducer(torchmetrics.MeanSquaredError(), name="error")
        self.values = self.context.wrap_reducer(torchmetrics.CatMetric(), name="values", for_training=False)
        self.measured: dict[str, Any] = {}

    def evaluate_batch(self, batch: Any) -> Any:
        self.error.update(self.model(batch[0]), batch[1])
        self.values.update(batch[1].sum())
        return super().evaluate_batch(batch)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"keeping": callback(pytorch, on_validation_end=lambda metrics: self.measured.update(metrics))}


class Unequal(Plain):
    """Its ranks begin with different weights."""

    def wrap(self) -> None:
        torch.manual_seed(self.context.distributed.rank)
        super().wrap()


class Raises(Plain):
    def train_on(self, batch: Any) -> torch.Tensor:
        if len(self.updates) == 3 and self.context.distributed.rank == 1:
            raise RuntimeError("a mistake on rank 1")
        return super().train_on(batch)


#: What is the same on two ranks as on one: the trial, and the aggregation frequency.
SCENARIOS: dict[str, tuple[type[Plain], int]] = {
    "plain": (Plain, 1),
    "aggregated": (Plain, 3),
    "clipped": (Clipped, 1),
    "clipped-aggregated": (Clipped, 3),
    "gan": (Gan, 1),
    "leaking": (Leaking, 1),
    "adding": (Adding, 1),
    "passes": (Passes, 1),
    "passes-aggregated": (Passes, 3),
    "unused": (Unused, 1),
    "frozen": (Frozen, 1),
    "measured": (Measured, 1),
}
