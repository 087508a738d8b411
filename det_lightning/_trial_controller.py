"""Which launcher the environment names, under Determined's names; scripts for batch inference ask for it."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from det_lightning.missing_parts import attribute_error

#: Makes ``from ... import NAME`` look for a submodule, whose error says why the name is missing.
__path__: list[str] = []


class _DistributedBackend:
    """What trains on several processes, by the variables that a launcher sets for its processes.

    The constants are the variables' names. A variable counts if it is not empty, as with Determined 0.38.1.

    Example:
        >>> import det_lightning as det
        >>> det._DistributedBackend().use_deepspeed()
        False
    """

    HOROVOD: ClassVar[str] = "USE_HOROVOD"
    DEEPSPEED: ClassVar[str] = "USE_DEEPSPEED"
    TORCH: ClassVar[str] = "USE_TORCH_DISTRIBUTED"

    def use_horovod(self) -> bool:
        """Return whether ``det_lightning.launch.horovod`` started the process."""
        return bool(os.environ.get(self.HOROVOD))

    def use_deepspeed(self) -> bool:
        """Return whether a launcher for DeepSpeed started the process."""
        return bool(os.environ.get(self.DEEPSPEED))

    def use_torch(self) -> bool:
        """Return whether ``det_lightning.launch.torch_distributed`` started the process."""
        return bool(os.environ.get(self.TORCH))


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
