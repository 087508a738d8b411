"""What only some releases of torch can do."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

#: ``trial_fsdp`` works from torch 2.13.
SHARDS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
needs_shards = pytest.mark.skipif(not SHARDS, reason="trial_fsdp needs torch 2.13")
