"""What only some releases of torch and Lightning can do."""

from __future__ import annotations

import pytest
from packaging.version import Version
from pytorch_lightning.__version__ import version as lightning_version
from torch.distributed.fsdp import FSDPModule

#: ``trial_fsdp`` works from torch 2.13.
SHARDS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
needs_shards = pytest.mark.skipif(not SHARDS, reason="trial_fsdp needs torch 2.13")
from_lightning_2_6 = pytest.mark.skipif(
    Version(lightning_version) < Version("2.6"), reason="it is new in Lightning 2.6"
)
