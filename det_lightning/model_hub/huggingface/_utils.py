"""The columns of a dataset that a model takes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Collators of transformers rename these to what models take.
_LABELS = ("label", "label_ids")


def remove_unused_columns(model: nn.Module, dataset: Any) -> None:
    """Let a dataset show only the columns that ``model.forward`` takes, and labels; the data themselves stay.

    Args:
        model: the model, wrapped or not.
        dataset: a ``datasets.Dataset``, whose format is changed.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    taken = [*inspect.signature(model.forward).parameters, *_LABELS]
    columns = [name for name in taken if name in dataset.column_names]
    dataset.set_format(type=dataset.format["type"], columns=columns)
