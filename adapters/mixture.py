"""Warnings and messages about programs that mix ``lightning`` with ``pytorch_lightning``."""

from __future__ import annotations

import logging
import sys
from typing import Any

from det_lightning.adapters.lightning_package import OTHER, PACKAGE, VARIABLE, pl

logger = logging.getLogger(__name__)

# By the start of a module's name, the package of the module, and the module's name in the other package.
_COUNTERPARTS = {
    "pytorch_lightning": ("pytorch_lightning", "lightning.pytorch"),
    "lightning_fabric": ("pytorch_lightning", "lightning.fabric"),
    "lightning.pytorch": ("lightning", "pytorch_lightning"),
    "lightning.fabric": ("lightning", "lightning_fabric"),
}


def warn_of_mixture() -> None:
    """Warn if the program has imported the other package of Lightning: trainers of the other package refuse a trial."""
    if OTHER in sys.modules:
        logger.warning(
            "This program imports both lightning and pytorch_lightning, and TrialModule is a LightningModule of %s: "
            "a trainer of %s refuses it. Import Lightning as %s everywhere; or, to use %s, import that before "
            "det_lightning, or set %s=%s.",
            *(PACKAGE, OTHER, PACKAGE, OTHER, VARIABLE, OTHER),
        )


def parts_of_other_package(trainer: pl.Trainer) -> list[str]:
    """Return a sentence for each callback, logger and plugin of a trainer from the other package."""
    flags: Any = trainer  # mypy does not see attributes set by Lightning's connectors
    strategy = trainer.strategy
    plugins = [
        strategy,
        strategy.precision_plugin,
        strategy.checkpoint_io,
        getattr(strategy, "cluster_environment", None),
    ]
    parts = [*flags.callbacks, *trainer.loggers, flags.profiler, flags.datamodule, *plugins]
    return [sentence for part in parts if (sentence := _describe(part)) is not None]


def _describe(part: Any) -> str | None:
    for kind in type(part).__mro__:
        start = ".".join(kind.__module__.split(".")[: 2 if kind.__module__.startswith("lightning.") else 1])
        package, counterpart = _COUNTERPARTS.get(start, (PACKAGE, ""))
        if package != PACKAGE:
            public = kind.__module__.removeprefix(start).split(".")[1:2]
            line = f"from {'.'.join([counterpart, *public])} import {kind.__name__}"
            derived = "" if kind is type(part) else f"a {kind.__name__} "
            return f"{type(part).__name__}, {derived}of {OTHER}: the trainer is one of {PACKAGE}, so write `{line}`"
    return None
