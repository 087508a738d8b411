"""A network that foretells the next value of a wave, trained in several processes."""

import hashlib
import pathlib
import tempfile
from typing import Any

import data
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from det_lightning import pytorch


class WaveTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``lr``, ``hidden``, ``global_batch_size``, which is that of all processes together."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.training_set, self.validation_set = self._load_data()
        hidden = context.get_hparam("hidden")
        network = nn.Sequential(nn.Linear(data.LENGTH, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.model = context.wrap_model(network)
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr")))
        # Which process trained on how many waves, counted by each and put together on all.
        self.waves = context.wrap_reducer(count_by_rank, for_training=True, for_validation=False)

    def _load_data(self) -> tuple[TensorDataset, TensorDataset]:
        """Let one process of each machine write the data, while the others of this machine wait for it."""
        distributed = self.context.distributed
        directory = None
        if distributed.local_rank == 0:
            directory = tempfile.mkdtemp(prefix="waves-")
            data.prepare(pathlib.Path(directory))
        # A message between the processes of a machine is what they wait for.
        directory = distributed.broadcast_local(directory)
        return data.load(pathlib.Path(directory))

    def weights_digest(self) -> str:
        """Return a number that two processes share only if all their weights are equal to the bit."""
        weights = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:12]

    def build_training_data_loader(self) -> pytorch.DataLoader:
        # Each process gets its own batches; det_lightning shares them out.
        return pytorch.DataLoader(self.training_set, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=50)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        values, following = batch
        loss = mse_loss(self.model(values).squeeze(1), following)
        self.context.backward(loss)  # averages the gradients over the processes
        self.context.step_optimizer(self.optimizer)
        self.waves.update((self.context.distributed.rank, len(values)))
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        values, following = batch
        return {"validation_loss": mse_loss(self.model(values).squeeze(1), following)}


def count_by_rank(batches: list[tuple[int, int]]) -> dict[str, int]:
    """Return how many waves each process trained on, given the rank and the size of each batch of all processes."""
    counts: dict[str, int] = {}
    for rank, size in batches:
        name = f"waves_of_rank_{rank}"
        counts[name] = counts.get(name, 0) + size
    return counts
