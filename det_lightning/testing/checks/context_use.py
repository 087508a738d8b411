"""Does the trial leave to its context everything that only the context may do?"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from det_lightning.testing.observation.source_scan import fixes_device, handles_processes, lines_in
from det_lightning.testing.outcomes import CheckFailed
from det_lightning.testing.training.requirements import files_of
from det_lightning.testing.training.runs import TrialRuns


def trains_through_its_context(runs: TrialRuns) -> None:
    """Backward passes and steps go through the context, and each scheduler is stepped once."""
    run, bypass = runs.probe
    if bypass.actions:
        raise CheckFailed(
            "The trial bypasses its context:",
            "lines left over from a plain PyTorch loop: they break aggregation, precision and several processes",
            details=bypass.actions,
        )
    runs.require(run)


def uses_no_hard_coded_device(runs: TrialRuns) -> None:
    """No line of the trial hard-codes a device, and none was seen using a device other than the context's."""
    _, bypass = runs.probe
    cause = (
        "a line left over from a script for one GPU: context.wrap_model() moves models to the device, batches are "
        "there already, and context.to_device(x) moves what the trial makes itself; context.device is the device"
    )
    _require_none(runs, fixes_device, bypass.devices, "The trial chooses devices itself:", cause)


def has_no_process_groups(runs: TrialRuns) -> None:
    """No line of the trial connects processes or distributes models and data."""
    _, bypass = runs.probe
    cause = (
        "code left over from plain DistributedDataParallel: context.wrap_model() wraps models, pytorch.DataLoader "
        "gives each process its part, and context.distributed has rank, size, allgather and broadcast"
    )
    _require_none(runs, handles_processes, bypass.process_groups, "The trial handles processes itself:", cause)


def _require_none(
    runs: TrialRuns, is_found: Callable[[ast.expr], bool], seen: Iterable[str], message: str, cause: str
) -> None:
    """Raise if the trial's files have such an expression, or the probe saw something on other lines."""
    with runs.source.imported():
        found = lines_in(files_of(runs.source), runs.source.directory, is_found)
    lines = {finding.partition(": ")[0] for finding in found}
    elsewhere = [call for call in seen if call.partition(": ")[0] not in lines]
    if details := dict.fromkeys([*found, *elsewhere]):
        raise CheckFailed(message, cause, details=details)
    run, _ = runs.probe
    if not run.training_began:
        runs.require(run)
