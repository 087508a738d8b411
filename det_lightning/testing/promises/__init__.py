"""The promises that a ported trial has to keep, and where each is checked. Imports nothing that is slow."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["PROMISES", "Promise"]


@dataclasses.dataclass(frozen=True)
class Promise:
    """One line of the checklist.

    Attributes:
        name: what the trial does if it holds, to be read after the trial's name.
        place: the function that checks it, as ``"module:function"`` below this package.
        keyword: a marker of pytest by which it is chosen, ``-m trial_resume``.
        option: it is checked only where this option was given.
    """

    name: str
    place: str
    keyword: str
    option: str | None = None

    def check(self, evidence: Any) -> None:
        """Check it.

        Raises:
            BrokenPromise: it does not hold.
            UncheckedPromise: it can not be checked here.
        """
        module, _, function = self.place.partition(":")
        found: Callable[[Any], None] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        found(evidence)


PROMISES = (
    Promise("trains", "training:trains", "trial_training"),
    Promise("is deterministic under a seed", "training:is_deterministic", "trial_training"),
    Promise("moves every trainable parameter", "training:moves_every_parameter", "trial_training"),
    Promise("validates with JSON-serializable metrics of stable names", "metrics:validates", "trial_metrics"),
    Promise("trains through its context", "conduct:trains_through_its_context", "trial_conduct"),
    Promise("uses no hard-coded device", "conduct:uses_no_hard_coded_device", "trial_conduct"),
    Promise("has no process-group code of its own", "conduct:has_no_process_groups", "trial_conduct"),
    Promise("checkpoint contains all the state that training changes", "state:is_complete", "trial_checkpoint"),
    Promise("checkpoint round-trips", "state:round_trips", "trial_checkpoint"),
    Promise("resumes bit-equal in the middle of an epoch", "resuming:mid_epoch", "trial_resume"),
    Promise("resumes bit-equal at the end of an epoch", "resuming:epoch_end", "trial_resume"),
    Promise("resumes bit-equal right after a validation", "resuming:after_validation", "trial_resume"),
    Promise("resumes bit-equal in the middle of an aggregation", "resuming:mid_aggregation", "trial_resume"),
    Promise("trains under aggregation", "aggregation:trains_under_aggregation", "trial_aggregation"),
    Promise("trains equally under both doors", "doors:trains_equally", "trial_doors"),
    Promise("two processes agree with one", "processes:two_agree_with_one", "trial_processes"),
    Promise("matches the real determined", "reference:matches", "trial_reference"),
    Promise("loads an old checkpoint", "checkpoint:loads", "trial_checkpoint", "checkpoint"),
    Promise(
        "reproduces the validation metrics of an old checkpoint",
        "checkpoint:reproduces_metrics",
        "trial_checkpoint",
        "checkpoint",
    ),
)
