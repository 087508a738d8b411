"""Train with Lightning, then a trial, and print which modules the second training imports until its first batch.

python first_batch.py determined|lightning
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch

OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
FLAGS: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **dict.fromkeys(OFF, False)}
DATA: Any = [torch.ones(1)]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_a_trial(api: str, known: set[str]) -> None:
    from det_lightning import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model = context.wrap_model(torch.nn.Linear(1, 1))
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            print(*sorted(sys.modules.keys() - known))
            loss = self.model(batch).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": self.model(batch).mean()}

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(DATA, batch_size=1)

        build_validation_data_loader = build_training_data_loader

    if api == "determined":
        with pytorch.init(enable_tensorboard_logging=False) as context:
            pytorch.Trainer(Trial(context), context, enable_progress_bar=False).fit(max_length=pytorch.Batch(1))
    else:
        from det_lightning.adapters import TrialModule

        pl.Trainer(**FLAGS).fit(TrialModule(Trial, max_length=pytorch.Batch(1)))


if __name__ == "__main__":
    pl.Trainer(**FLAGS, max_steps=1).fit(Module(), torch.utils.data.DataLoader(DATA))
    train_a_trial(sys.argv[1], set(sys.modules))
