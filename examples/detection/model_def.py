"""A detector of two stages that finds figures in drawings, or the objects of COCO."""

from typing import Any

import data
import torch
from detector import Detector
from metric import AveragePrecision

from det_lightning import pytorch

VALIDATION_BATCH_SIZE = 20


class DetectionTrial(pytorch.PyTorchTrial):
    """Hyperparameters: ``lr``, ``weight_decay``, ``width``, ``anchor_sizes``, ``proposals``, ``global_batch_size``.

    Data: ``source`` and ``size``, see data.py.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        section = context.get_data_config()
        self.training_set, self.validation_set, self.class_names = data.load(section["source"], section["size"])
        network = Detector(
            classes=len(self.class_names),
            image_size=section["size"],
            width=context.get_hparam("width"),
            anchor_sizes=context.get_hparam("anchor_sizes"),
            proposals=context.get_hparam("proposals"),
        )
        self.model = context.wrap_model(network)
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(
                self.model.parameters(), lr=context.get_hparam("lr"), weight_decay=context.get_hparam("weight_decay")
            )
        )
        self.precision = context.wrap_reducer(AveragePrecision(), name="average_precision", for_training=False)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        batch_size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.training_set, batch_size=batch_size, shuffle=True, collate_fn=data.collate)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.validation_set, batch_size=VALIDATION_BATCH_SIZE, collate_fn=data.collate)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        losses = self.model(*batch)
        total = sum(losses.values(), torch.tensor(0.0))
        self.context.backward(total)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, max_norm=5)
        )
        return {"loss": total, **losses}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        images, boxes, classes = batch
        for found, real, numbers in zip(self.model(images), boxes, classes, strict=True):
            self.precision.update(found, real[numbers > 0], numbers[numbers > 0])
        return {}
