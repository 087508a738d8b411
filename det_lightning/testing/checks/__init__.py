"""The list of checks of a ported trial, with their outcomes. Imports nothing slow.

Change here: a new check is a function in a module beside this file, and a ``Check`` in ``CHECKS``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable
from typing import Any

from det_lightning.importing import load_class

#: Kinds of trials.
PYTORCH = "PyTorchTrial"
ESTIMATOR = "EstimatorTrial"
_BOTH = (PYTORCH, ESTIMATOR)
_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of a trial."""

    name: str  # forms a sentence after the trial's name
    function: str  # "module:function" below this package
    keyword: str  # the pytest marker that selects it
    kinds: tuple[str, ...] = (PYTORCH,)  # the kinds of trials that it applies to
    option: str | None = None  # the option that it needs
    is_quick: bool = True  # whether it trains in this process only

    def run(self, runs: Any) -> list[str]:
        """Raise unless the trial passes; return remarks."""
        return load_class(f"{__name__}.{self.function}")(runs) or []


_for_old_checkpoint = functools.partial(Check, keyword="trial_checkpoint", option="checkpoint")
_processes = functools.partial(Check, keyword="trial_processes", is_quick=False)
CHECKS = (
    Check("trains", "training:trains", "trial_training", _BOTH),
    Check("is deterministic under a seed", "training:is_deterministic", "trial_training", _BOTH),
    Check(
        "is deterministic in another process", "training:is_deterministic_elsewhere", "trial_training", is_quick=False
    ),
    Check("moves every trainable parameter", "training:moves_every_parameter", "trial_training"),
    Check("validates with JSON-serializable metrics of stable names", "metrics:validates", "trial_metrics", _BOTH),
    Check("is not changed by a validation", "metrics:changes_nothing", "trial_metrics"),
    Check("metrics do not grow with the batch", "metrics:grow_not", "trial_metrics"),
    Check("trains through its context", "training:trains_through_its_context", "trial_context"),
    Check("uses no hard-coded device", "training:uses_no_hard_coded_device", "trial_context"),
    Check("has no process-group code of its own", "training:has_no_process_groups", "trial_context"),
    Check("checkpoint contains all the state that training changes", "checkpoints:is_complete", "trial_checkpoint"),
    Check("checkpoint round-trips", "checkpoints:round_trips", "trial_checkpoint", _BOTH),
    Check("data resume where they stopped", "checkpoints:data_resume", "trial_resume"),
    Check("resumes bit-equal in the middle of an epoch", "checkpoints:mid_epoch", "trial_resume", _BOTH),
    Check("resumes bit-equal at the end of an epoch", "checkpoints:epoch_end", "trial_resume", _BOTH),
    Check("resumes bit-equal right after a validation", "checkpoints:after_validation", "trial_resume", _BOTH),
    Check("resumes bit-equal in the middle of an aggregation", "checkpoints:mid_aggregation", "trial_resume", _BOTH),
    Check("trains under aggregation", "training:trains_under_aggregation", "trial_aggregation"),
    Check("trains equally under both APIs", "training:trains_equally", "trial_apis", _BOTH),
    _processes("two processes train on the samples of one", "processes:share_samples"),
    _processes("two processes keep their weights equal", "processes:keep_equal_weights"),
    _processes("two processes agree with one", "processes:agree_with_one"),
    _processes("two processes validate like one", "processes:validate_like_one"),
    _processes("trains in two processes", "processes:two_train", kinds=(ESTIMATOR,)),
    Check("matches the real determined", "training:matches_reference", "trial_reference", is_quick=False),
    _for_old_checkpoint("loads an old checkpoint", "old_checkpoints:loads"),
    _for_old_checkpoint("reproduces the validation metrics of an old checkpoint", "old_checkpoints:reproduces_metrics"),
)


# Their outcomes


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of a check."""

    name: str  # such as "is deterministic under a seed"
    outcome: str  # "passed", "failed" or "skipped"
    duration_s: float = 0.0
    message: str = ""  # why it failed or was skipped, or remarks; may have several lines


class BadTrial(Exception):
    """The trial cannot be imported or lacks something; the message says how to continue."""


class NotCompared(Exception):
    """A check had nothing to compare; the message gives the reason and the remedy."""


class CheckFailed(AssertionError):
    """The trial fails a check: a message, the usual causes (likeliest first), and further findings."""

    def __init__(self, message: str, *causes: str, details: Iterable[str] = ()) -> None:
        heading = ["Usual causes:"] if causes else []
        items = [[f"  - {item}" for item in items] for items in (details, causes)]
        super().__init__("\n".join([message, *items[0], *heading, *items[1]]))


def list_names(names: Collection[str]) -> str:
    """Return names separated by commas; if there are many, the first names and the total number."""
    first = ", ".join(itertools.islice(names, _LISTED))
    return first if len(names) <= _LISTED else f"{first}, ... ({len(names)} in all)"
