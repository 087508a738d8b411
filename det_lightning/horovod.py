"""``hvd``: ``horovod.torch``, at Determined's path."""

from __future__ import annotations

import importlib
from typing import Any

from det_lightning.missing_parts import attribute_error, how_to_build_horovod

__all__ = ["hvd"]

__path__: list[str] = []  # the import of a missing name becomes an error with the reason


class _Horovod:
    """Stands in for ``horovod.torch``, imported on first use of an attribute.

    Trials with ``strategy="horovod"`` of ``init()`` connect Horovod.
    """

    def require_horovod_type(self, horovod_type: str, reason: str) -> None:
        """Accept ``"torch"``.

        Raises:
            ValueError: another type is required; ``reason`` explains why.
        """
        if horovod_type != "torch":
            raise ValueError(
                f"horovod_type must be 'torch', because det_lightning trains PyTorch models; got {horovod_type!r}: "
                f"{reason}"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle, copy and inspect look these up
            raise AttributeError(name)
        try:
            module = importlib.import_module("horovod.torch")
        except ImportError as error:
            raise ImportError(
                f"hvd.{name} needs Horovod, which cannot be imported ({error}). {how_to_build_horovod()} Without "
                "Horovod, context.distributed has rank, size and allgather(), and torch.distributed exchanges tensors."
            ) from error
        return getattr(module, name)


hvd = _Horovod()


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
