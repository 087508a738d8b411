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

_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of a trial."""

    name: str  # forms a sentence after the trial's name
    function: str  # "module:function" below this package
    option: str | None = None  # the option that it needs
    is_quick: bool = True  # whether it trains in this process only

    def run(self, runs: Any) -> list[str]:
        """Raise unless the trial passes; return remarks."""
        return load_class(f"{__name__}.{self.function}")(runs) or []


_for_old_checkpoint = functools.partial(Check, option="checkpoint")
_processes = functools.partial(Check, is_quick=False)
CHECKS = (
    Check("trains", "training:trains"),
    Check("is deterministic under a seed", "training:is_deterministic"),
    _processes("is deterministic in another process", "training:is_deterministic_elsewhere"),
    Check("moves every trainable parameter", "training:moves_every_parameter"),
    Check("validates with JSON-serializable metrics of stable names", "metrics:validates"),
    Check("is not changed by a validation", "metrics:changes_nothing"),
    Check("metrics do not grow with the batch", "metrics:grow_not"),
    Check("trains through its context", "training:trains_through_its_context"),
    Check("uses no hard-coded device", "training:uses_no_hard_coded_device"),
    Check("has no process-group code of its own", "training:has_no_process_groups"),
    Check("checkpoint contains all the state that training changes", "checkpoints:is_complete"),
    Check("checkpoint round-trips", "checkpoints:round_trips"),
    Check("resumes bit-equal in the middle of an epoch", "checkpoints:mid_epoch"),
    Check("resumes bit-equal at the end of an epoch", "checkpoints:epoch_end"),
    Check("resumes bit-equal right after a validation", "checkpoints:after_validation"),
    Check("resumes bit-equal in the middle of an aggregation", "checkpoints:mid_aggregation"),
    Check("trains under aggregation", "training:trains_under_aggregation"),
    _processes("two processes train on the samples of one", "processes:share_samples"),
    _processes("two processes keep their weights equal", "processes:keep_equal_weights"),
    _processes("two processes agree with one", "processes:agree_with_one"),
    _processes("two processes validate like one", "processes:validate_like_one"),
    _processes("matches the real determined", "training:matches_reference"),
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
