"""Lightning as the tests use it: from the package that det_lightning has chosen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from det_lightning.adapters.lightning_package import lightning_version, pl

if TYPE_CHECKING:
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
else:
    _boring = importlib.import_module(f"{pl.__name__}.demos.boring_classes")
    BoringModel, BoringDataModule = _boring.BoringModel, _boring.BoringDataModule

__all__ = ["BoringDataModule", "BoringModel", "lightning_version", "pl"]
