"""``remove_unused_columns``: limits a dataset to the columns in the signature of a model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Collators of transformers rename these to what models take.
_LABELS = ("label", "label_ids")


def remove_unused_columns(model: nn.Module, dataset: Any) -> None:
    """Let a dataset show only labels and the columns in the signature of ``model.forward``; no data are removed.

    Args:
        model: the model, wrapped or not.
        dataset: a ``datasets.Dataset``; the function changes the format.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    taken = [*inspect.signature(model.forward).parameters, *_LABELS]
    columns = [name for name in taken if name in dataset.column_names]
    dataset.set_format(type=dataset.format["type"], columns=columns)
