"""Training with ``transformers.Trainer``, at the path that it has in Determined."""

from det_lightning.transformers._hf_callback import DetCallback

__all__ = ["DetCallback"]
