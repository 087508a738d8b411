"""What surrounds a run in this process: generators, torch's defaults, what is logged."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["quietly", "seed_generators", "torch_defaults"]


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's random generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Undo what a trial sets for the whole process; share the cores with the other workers of pytest-xdist."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leave out what would be said of each of many short runs."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning.pytorch", "det_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
