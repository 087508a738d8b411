"""A trial, rewritten as a LightningModule that needs no det_lightning."""

from det_lightning.porting.to_lightning.writer import NoTrialError, write_module
from det_lightning.porting.to_lightning.written_module import Todo, WrittenModule

__all__ = ["NoTrialError", "Todo", "WrittenModule", "write_module"]
