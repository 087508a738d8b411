"""The checks of a ported trial, and the functions that run them. Imports nothing slow."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from det_lightning.importing import load_class

#: Kinds of trials.
PYTORCH = "PyTorchTrial"
ESTIMATOR = "EstimatorTrial"
_BOTH = (PYTORCH, ESTIMATOR)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of a trial."""

    name: str  # forms a sentence after the trial's name
    function: str  # "module:function" below this package
    keyword: str  # the pytest marker that selects it
    kinds: tuple[str, ...] = (PYTORCH,)  # the kinds of trials that it applies to
    option: str | None = None  # the option that it needs

    def run(self, runs: Any) -> None:
        """Run the check; raises CheckFailed, NotChecked or BadTrial."""
        load_class(f"{__name__}.{self.function}")(runs)


_of_old = functools.partial(Check, keyword="trial_checkpoint", option="checkpoint")
CHECKS = (
    Check("trains", "training:trains", "trial_training", _BOTH),
    Check("is deterministic under a seed", "training:is_deterministic", "trial_training", _BOTH),
    Check("moves every trainable parameter", "training:moves_every_parameter", "trial_training"),
    Check("validates with JSON-serializable metrics of stable names", "metrics:validates", "trial_metrics", _BOTH),
    Check("trains through its context", "training:trains_through_its_context", "trial_context"),
    Check("uses no hard-coded device", "training:uses_no_hard_coded_device", "trial_context"),
    Check("has no process-group code of its own", "training:has_no_process_groups", "trial_context"),
    Check("checkpoint contains all the state that training changes", "checkpoints:is_complete", "trial_checkpoint"),
    Check("checkpoint round-trips", "checkpoints:round_trips", "trial_checkpoint", _BOTH),
    Check("resumes bit-equal in the middle of an epoch", "checkpoints:mid_epoch", "trial_resume", _BOTH),
    Check("resumes bit-equal at the end of an epoch", "checkpoints:epoch_end", "trial_resume", _BOTH),
    Check("resumes bit-equal right after a validation", "checkpoints:after_validation", "trial_resume", _BOTH),
    Check("resumes bit-equal in the middle of an aggregation", "checkpoints:mid_aggregation", "trial_resume", _BOTH),
    Check("trains under aggregation", "training:trains_under_aggregation", "trial_aggregation"),
    Check("trains equally under both APIs", "training:trains_equally", "trial_apis", _BOTH),
    Check("two processes agree with one", "processes:two_agree_with_one", "trial_processes"),
    Check("trains in two processes", "processes:two_train", "trial_processes", (ESTIMATOR,)),
    Check("matches the real determined", "training:matches_reference", "trial_reference"),
    _of_old("loads an old checkpoint", "old_checkpoints:loads"),
    _of_old("reproduces the validation metrics of an old checkpoint", "old_checkpoints:reproduces_metrics"),
)
