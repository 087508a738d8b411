"""Zeroing gradients as torch does, but without labels for a profiler that does not run.

torch sets a label (``torch.profiler.record_function``) for every batch and every ``zero_grad()`` whether or not a
profiler runs, which takes longer than everything else that a training adds to a batch here. While one runs, the labels
are set, so traces stay the same. Batches are loaded in the same way; see ``det_lightning/engine/loader_workers.py``.
"""

from __future__ import annotations

import torch
from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]  # no public name

__all__ = ["TORCHS_ZERO_GRAD", "profiler_enabled"]

#: Does nothing but remove gradients, and label that.
TORCHS_ZERO_GRAD = torch.optim.Optimizer.zero_grad
