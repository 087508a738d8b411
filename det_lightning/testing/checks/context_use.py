"""Does the trial leave to its context what is the context's?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from det_lightning.testing.observation.source_scan import CodeLine, devices_in, process_groups_in
from det_lightning.testing.outcomes import CheckFailed
from det_lightning.testing.training.requirements import files_of
from det_lightning.testing.training.runs import TrialRuns

_Scan = Callable[[Iterable[Path], Path], list[CodeLine]]


def trains_through_its_context(runs: TrialRuns) -> None:
    """Backward passes and steps go through the context, each scheduler is stepped once."""
    run, bypass = runs.probe
    if bypass.actions:
        raise CheckFailed(
            "The trial does past its context what the context has to do, and to know of:",
            bypass.actions,
            ["lines of a plain PyTorch loop that were kept: they break aggregation, precision and several processes"],
        )
    runs.require(run)


def uses_no_hard_coded_device(runs: TrialRuns) -> None:
    """No line of the trial fixes a device, and none was seen to use another than the context's."""
    run, bypass = runs.probe
    found = _found(runs, devices_in, bypass.devices)
    if found:
        raise CheckFailed(
            "The trial chooses devices itself:",
            found,
            [
                "a line of a script for one GPU that was kept: context.wrap_model() places models, batches are moved "
                "already, and context.to_device(x) moves what the trial makes itself; context.device is the device"
            ],
        )
    if not run.training_began:
        runs.require(run)


def has_no_process_groups(runs: TrialRuns) -> None:
    """No line of the trial connects processes or distributes models and data."""
    run, bypass = runs.probe
    found = _found(runs, process_groups_in, bypass.process_groups)
    if found:
        raise CheckFailed(
            "The trial handles processes itself:",
            found,
            [
                "code for plain DistributedDataParallel that was kept: context.wrap_model() wraps models, "
                "pytorch.DataLoader gives each process its part, and context.distributed has rank, size, allgather "
                "and broadcast"
            ],
        )
    if not run.training_began:
        runs.require(run)


def _found(runs: TrialRuns, scan: _Scan, seen: Iterable[str]) -> dict[str, None]:
    """Return what ``scan`` reads in the trial's files, and what a run has seen elsewhere, each once."""
    with runs.source.imported():
        read = scan(files_of(runs.source), runs.source.directory)
    lines = {code.line for code in read}
    elsewhere = [found for found in seen if found.rpartition(": ")[0] not in lines]
    return dict.fromkeys([*map(str, read), *elsewhere])
