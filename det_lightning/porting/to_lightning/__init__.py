"""Rewrites a trial as a LightningModule that does not need det_lightning."""

from det_lightning.porting.to_lightning.writer import NoTrialError, Todo, WrittenModule, write_module

__all__ = ["NoTrialError", "Todo", "WrittenModule", "write_module"]
