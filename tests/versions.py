"""What only some releases of torch and Lightning can do."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from pytorch_lightning.__version__ import version as lightning_version
from torch.distributed.fsdp import FSDPModule

#: ``trial_fsdp`` works from torch 2.13.
SHARDS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
needs_shards = pytest.mark.skipif(not SHARDS, reason="trial_fsdp needs torch 2.13")


def draws_dropout_as_torch_2_13_cpu() -> bool:
    """Return whether the same state of the generator gives the same mask of dropout, which it does not in torch 2.6."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mask = torch.nn.functional.dropout(torch.ones(32), 0.3) > 0
    return "".join(str(int(kept)) for kept in mask.tolist()) == "00101011111111111110111111110101"


_IS_LIGHTNING_2_6 = Version(lightning_version) >= Version("2.6")
from_lightning_2_6 = pytest.mark.skipif(not _IS_LIGHTNING_2_6, reason="it is new in Lightning 2.6")
