"""Training with ``transformers.Trainer``, at the same path as in Determined."""

from det_lightning.transformers._hf_callback import DetCallback

__all__ = ["DetCallback"]
