"""This machine: GPUs and other slots, and trials as processes."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from det_lightning import errors
from det_lightning.escaping import name_some
from det_lightning.experiments.directory import ExperimentDirectory, Options
from det_lightning.experiments.launcher import Demand, Launcher, Record
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.experiments.trial_process import TrialProcess

# A line of nvidia-smi -L, with the UUID.
_GPU = re.compile(r"GPU \d+: .*\(UUID: (\S+)\)")
# Far more than a machine can train with.
_MOST_PER_CPU = 32
# How the UUID of a part of a GPU begins.
_PART = "MIG-"
_PART_LISTED = re.compile(rf"\(UUID: ({_PART}\S+)\)")


class Gpu(NamedTuple):
    """A GPU, or a part of a GPU."""

    name: str  # for CUDA_VISIBLE_DEVICES
    uuid: str


@dataclasses.dataclass(frozen=True)
class Devices:
    """The slots of this machine."""

    slots: tuple[int, ...]  # indices of GPUs; just numbers for parts of GPUs (MIG) and on the CPU
    gpus: Mapping[int, Gpu] = dataclasses.field(default_factory=dict)  # by slot; empty on the CPU


class LocalLauncher(Launcher):
    """Starts trials as processes on this machine, as many at once as there are slots for."""

    def __init__(
        self, directory: ExperimentDirectory, config: dict[str, Any], options: Options, demand: Demand
    ) -> None:
        self._devices = find_devices(demand)
        super().__init__(directory, config, options, demand, are_gpus=bool(self._devices.gpus))
        self._slots_per_trial = max(demand.slots_per_trial, 1)
        self._free = list(self._devices.slots)
        self._held: dict[int, list[int]] = {}

    @staticmethod
    def check(demand: Demand, folder: Path) -> None:
        find_devices(demand)

    def has_room(self) -> bool:
        return len(self._free) >= self._slots_per_trial

    def start(self, trial: TrialRecord, state: ExperimentState, record: Record) -> TrialProcess:
        slots = self._free[: self._slots_per_trial]
        self._held[trial.trial_id] = slots
        del self._free[: self._slots_per_trial]
        gpus = [self._devices.gpus[slot] for slot in slots if slot in self._devices.gpus]
        prepared = self.prepare(trial, state, slots, [gpu.uuid for gpu in gpus])
        # The processes of a trial must see no devices of other trials.
        return prepared.start(os.environ, [gpu.name for gpu in gpus])

    def release(self, trial_id: int) -> None:
        self._free = sorted([*self._free, *self._held.pop(trial_id, [])])


def find_devices(demand: Demand) -> Devices:
    """Return the devices of this machine for an experiment's trials; raise an ExperimentError if there are too few."""
    demand.check_limit()
    devices = _choose_devices(demand.slots_per_trial, demand.on_cpu)
    most = demand.max_slots if demand.slots_per_trial else None  # trials of no slots take none
    return dataclasses.replace(devices, slots=devices.slots[:most])


def _choose_devices(slots_per_trial: int, on_cpu: bool) -> Devices:
    cpus = os.cpu_count() or 1
    if slots_per_trial > _MOST_PER_CPU * cpus:
        raise errors.ExperimentError(
            f"A trial of {slots_per_trial:,} processes (--slots, or resources.slots_per_trial) is too large for this "
            f"machine, which has {cpus} CPUs: at most {_MOST_PER_CPU * cpus} can run, {_MOST_PER_CPU} on each CPU."
        )
    gpus = {} if on_cpu or slots_per_trial == 0 else find_gpus()
    if on_cpu or slots_per_trial == 0 or (not gpus and slots_per_trial == 1):
        return Devices(tuple(range(max(cpus, slots_per_trial))))
    if slots_per_trial > len(gpus):
        fewer = f"--slots {len(gpus)} for trials of {len(gpus)} processes, or " if gpus else ""
        raise errors.ExperimentError(
            f"resources.slots_per_trial is {slots_per_trial}, and this machine has {len(gpus) or 'no'} GPUs. Use "
            f"{fewer}--cpu for {slots_per_trial} processes on the CPU, or --slots N for another number."
        )
    if slots_per_trial > 1 and any(gpu.name.startswith(_PART) for gpu in gpus.values()):
        raise errors.ExperimentError(
            f"resources.slots_per_trial is {slots_per_trial}, and CUDA_VISIBLE_DEVICES names parts of GPUs (MIG), of "
            "which CUDA gives a process only one: use --slots 1, or --cpu, or name whole GPUs."
        )
    return Devices(tuple(gpus), gpus)


def find_gpus() -> dict[int, Gpu]:
    """Return the GPUs for this process, by slot, without spending seconds on importing torch.

    The slot of a whole GPU is its index. ``CUDA_VISIBLE_DEVICES`` may name parts of GPUs; raise an ExperimentError if
    this machine lacks such a part.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    ids = [found[1] for line in listed.splitlines() if (found := _GPU.match(line))]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return {index: Gpu(str(index), uuid) for index, uuid in enumerate(ids)}
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    parts = [_find_part(name, _PART_LISTED.findall(listed)) for name in names if name.startswith(_PART)]
    if parts:
        return {slot: Gpu(part, part) for slot, part in enumerate(dict.fromkeys(parts))}
    # Schedulers of clusters name a GPU by index, or by the beginning of the UUID.
    uuids = [name for name in names if name.startswith("GPU-")]
    indices = {name: i for i, gpu in enumerate(ids) for name in (str(i), *filter(gpu.startswith, uuids))}
    return {index: Gpu(str(index), ids[index]) for index in map(indices.get, names) if index is not None}


def _find_part(name: str, parts: list[str]) -> str:
    """Return the only part of a GPU whose name begins with ``name``; raise an ExperimentError otherwise."""
    found = [part for part in parts if part.startswith(name)]
    if len(found) != 1:
        raise errors.ExperimentError(
            f"CUDA_VISIBLE_DEVICES names {name}, which matches {len(found) or 'none'} of the parts of GPUs "
            f"(MIG) that nvidia-smi -L lists: {name_some(parts) or 'none'}. Name one part, or train with --cpu."
        )
    return found[0]
