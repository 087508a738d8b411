"""A transformer trained in shards: mixed precision of FSDP2, activation checkpointing, and compiled blocks.

torchrun --nproc-per-node 8 docs/large_model.py
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import det_lightning as det
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from det_lightning.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

HPARAMS = {
    "global_batch_size": 64,
    "layers": 12,
    "width": 768,
    "vocabulary": 8192,
    "length": 256,
    "compile": "inductor",
}


class Block(torch.nn.Module):
    """One layer, and what FSDP2 gathers at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], inputs.device, inputs.dtype)
        return self.layer(inputs, src_mask=mask, is_causal=True)


class LanguageModel(torch.nn.Module):
    """Predicts each token from those before it."""

    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Parameter(torch.zeros(length, width))
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(layers)])
        self.out = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            # Activations within a block are computed again in the backward pass, and only its inputs are kept.
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.out(hidden)


class LargeTrial(PyTorchTrial):
    """Learns to repeat sequences of random tokens."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        sizes = {name: context.get_hparam(name) for name in ("vocabulary", "width", "layers", "length")}
        model = LanguageModel(**sizes)
        for block in model.blocks:
            block.compile(backend=context.get_hparam("compile"))  # before wrap_model(): one graph for each block
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=3e-4))

    def make_loader(self) -> DataLoader:
        vocabulary, length = self.context.get_hparam("vocabulary"), self.context.get_hparam("length")
        tokens = torch.randint(vocabulary, (1024, length // 2), generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(torch.cat([tokens, tokens, tokens[:, :1]], dim=1))
        return DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    build_training_data_loader = make_loader
    build_validation_data_loader = make_loader

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.model(batch[0][:, :-1])
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[0][:, 1:].flatten())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"validation_loss": self.loss(batch)}


def main() -> None:
    """Train, or go on from the newest checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hparams", type=json.loads, default={}, help="JSON with other values of HPARAMS")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--storage", default="checkpoints")
    options = parser.parse_args()
    strategy = PerModelFSDPStrategy(
        policy=[Block],
        # Forward and backward passes compute in bfloat16, gradients are summed in float32, and so are weights kept.
        mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        sharded_checkpoints=True,
    )
    with det.pytorch.init(hparams={**HPARAMS, **options.hparams}, strategy=strategy) as context:
        trainer = det.pytorch.Trainer(LargeTrial(context), context)
        trainer.fit(
            max_length=det.pytorch.Batch(options.batches),
            checkpoint_storage=options.storage,
            checkpoint_policy="none",
            latest_checkpoint="last",
        )


if __name__ == "__main__":
    main()
