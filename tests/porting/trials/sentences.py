"""A reducer class, a callback that steps a scheduler by a metric, and a data section, as in the examples for BERT."""

from typing import Any, Dict, List

import determined.pytorch as det_torch
import torch
from determined import pytorch
from determined.pytorch import MetricReducer
from torch import nn


def mean_of(values: List[float]) -> float:
    return sum(values) / len(values)


class Accuracy(MetricReducer):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.count = 0, 0

    def update(self, right: int, count: int) -> None:
        self.right += right
        self.count += count

    def per_slot_reduce(self):
        return self.right, self.count

    def cross_slot_reduce(self, per_slot_metrics: List[Any]) -> float:
        rights, counts = zip(*per_slot_metrics)
        return sum(rights) / max(1, sum(counts))


class ReduceOnPlateau(det_torch.PyTorchCallback):
    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler

    def on_validation_end(self, metrics: Dict[str, Any]) -> None:
        self.scheduler.step(metrics["validation_loss"])

    def state_dict(self) -> Dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict["scheduler"])


class SentencesTrial(det_torch.PyTorchTrial):
    def __init__(self, context: det_torch.PyTorchTrialContext) -> None:
        super(SentencesTrial, self).__init__(context)
        self.context = context
        self.data_config = self.context.get_data_config()
        self.model = self.context.wrap_model(
            nn.Sequential(
                nn.EmbeddingBag(self.data_config["vocabulary"], 8),
                nn.LayerNorm(8),
                nn.Linear(8, 2),
            ),
        )
        decayed = {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1}
        other = {"params": [p for p in self.model.parameters() if p.dim() <= 1]}
        optimizer = torch.optim.AdamW([decayed, other], lr=context.get_hparam("lr"))
        self.optimizer = self.context.wrap_optimizer(optimizer)
        self.scheduler = context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0),
            step_mode=det_torch.LRScheduler.StepMode.MANUAL_STEP,
        )
        self.accuracy = self.context.experimental.wrap_reducer(Accuracy(), name="accuracy", for_training=False)
        self.bias = self.context.experimental.wrap_reducer(mean_of, "bias", for_training=False)

    def build_callbacks(self) -> Dict[str, pytorch.PyTorchCallback]:
        return {"plateau": ReduceOnPlateau(self.scheduler)}

    def _sentences(self, count: int) -> torch.utils.data.TensorDataset:
        words = torch.randint(20, (count, 5), generator=torch.Generator().manual_seed(count))
        return torch.utils.data.TensorDataset(words, words[:, 0] % 2)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self._sentences(24), batch_size=self.context.get_per_slot_batch_size() * 2 // 2)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self._sentences(10), batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int) -> Dict[str, Any]:
        words, labels = batch
        loss = nn.functional.cross_entropy(self.model(words), labels)
        self.context.backward(loss)

        def clip(parameters):
            torch.nn.utils.clip_grad_norm_(parameters, self.context.get_hparam("clip"))

        self.context.step_optimizer(self.optimizer, clip)
        metrics = {"loss": loss}
        metrics["epoch"] = float(epoch_idx)
        return metrics

    def evaluate_batch(self, batch: pytorch.TorchData) -> Dict[str, Any]:
        words, labels = batch
        output = self.model(words)
        self.accuracy.update((output.argmax(1) == labels).sum().item(), len(labels))
        self.bias.update(output.mean().item())
        return {"validation_loss": nn.functional.cross_entropy(output, labels)}
