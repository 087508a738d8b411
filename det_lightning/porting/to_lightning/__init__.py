"""Rewriting a trial as a LightningModule without any need of det_lightning."""

from det_lightning.porting.to_lightning.writer import NoTrialError, Todo, WrittenModule, write_module

__all__ = ["NoTrialError", "Todo", "WrittenModule", "write_module"]
