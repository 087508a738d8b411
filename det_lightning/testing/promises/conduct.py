"""Does the trial leave to its context what is the context's?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from det_lightning.testing.evidence import Evidence
from det_lightning.testing.outcomes import BrokenPromise
from det_lightning.testing.training.requirements import files_of
from det_lightning.testing.watching.scanning import Finding, devices_in, process_groups_in

__all__ = ["has_no_process_groups", "trains_through_its_context", "uses_no_hard_coded_device"]

_Scan = Callable[[Iterable[Path], Path], list[Finding]]


def trains_through_its_context(evidence: Evidence) -> None:
    """Backward passes and steps go through the context, each scheduler is stepped once."""
    run, conduct = evidence.probe
    if conduct.past_context:
        raise BrokenPromise(
            "The trial does past its context what the context has to do, and to know of:",
            conduct.past_context,
            ["lines of a plain PyTorch loop that were kept: they break aggregation, precision and several processes"],
        )
    evidence.require(run)


def uses_no_hard_coded_device(evidence: Evidence) -> None:
    """No line of the trial fixes a device, and none was seen to use another than the context's."""
    run, conduct = evidence.probe
    found = _found(evidence, devices_in, conduct.devices)
    if found:
        raise BrokenPromise(
            "The trial chooses devices itself:",
            found,
            [
                "a line of a script for one GPU that was kept: context.wrap_model() places models, batches are moved "
                "already, and context.to_device(x) moves what the trial makes itself; context.device is the device"
            ],
        )
    if not run.observer.begun:
        evidence.require(run)


def has_no_process_groups(evidence: Evidence) -> None:
    """No line of the trial connects processes or shares out models and data."""
    run, conduct = evidence.probe
    found = _found(evidence, process_groups_in, conduct.process_groups)
    if found:
        raise BrokenPromise(
            "The trial handles processes itself:",
            found,
            [
                "code for plain DistributedDataParallel that was kept: context.wrap_model() wraps models, "
                "pytorch.DataLoader gives each process its share, and context.distributed has rank, size, allgather "
                "and broadcast"
            ],
        )
    if not run.observer.begun:
        evidence.require(run)


def _found(evidence: Evidence, scan: _Scan, seen: Iterable[str]) -> dict[str, None]:
    """Return what ``scan`` reads in the trial's files, and what a run has seen at other places, each once."""
    with evidence.setup.source.imported():
        read = scan(files_of(evidence.setup), evidence.setup.source.directory)
    places = {finding.place for finding in read}
    elsewhere = [sight for sight in seen if sight.rpartition(": ")[0] not in places]
    return dict.fromkeys([*map(str, read), *elsewhere])
