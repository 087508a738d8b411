"""Training with ``transformers.Trainer``, at Determined's path."""

from det_lightning.transformers._hf_callback import DetCallback

__all__ = ["DetCallback"]
