"""The GPUs that trials may use, by what nvidia-smi lists and CUDA_VISIBLE_DEVICES allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from det_lightning.errors import ExperimentError
from det_lightning.experiments.launcher import Demand
from det_lightning.experiments.local import Devices, Gpu, find_devices, find_gpus
from tests.experiments.running import run, run_project

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")

LISTED = """#!/bin/sh
echo "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c1a)"
echo "  MIG 1g.5gb      Device  0: (UUID: MIG-77)"
echo "  MIG 1g.5gb      Device  1: (UUID: MIG-78)"
echo "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-9f20)"
"""


@pytest.fixture(autouse=True)
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(LISTED)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


BY_INDEX = [(None, (0, 1)), ("1", (1,)), ("1, 0", (1, 0)), ("", ()), ("7", ())]
BY_UUID = [("GPU-9f20", (1,)), ("GPU-9,GPU-5c1a", (1, 0))]


@pytest.mark.parametrize(("allowed", "gpus"), [*BY_INDEX, *BY_UUID])
def test_gpus_are_allowed_by_name(allowed: str | None, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    uuids = ("GPU-5c1a", "GPU-9f20")
    assert list(find_gpus().items()) == [(gpu, Gpu(str(gpu), uuids[gpu])) for gpu in gpus]


def test_single_processes_get_parts_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-78, MIG-77,MIG-78")
    devices = find_devices(Demand(slots_per_trial=1))
    assert devices == Devices((0, 1), {0: Gpu("MIG-78", "MIG-78"), 1: Gpu("MIG-77", "MIG-77")})
    with pytest.raises(ExperimentError, match=r"names parts of GPUs .* use --slots 1"):
        find_devices(Demand(slots_per_trial=2))


@pytest.mark.parametrize(("name", "found"), [("MIG-0", "none"), ("MIG-", "2"), ("MIG-7", "2"), ("MIG-780", "none")])
def test_unclear_part_of_a_gpu_is_named(name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"MIG-77,{name}")
    with pytest.raises(ExperimentError, match=rf"names {name}, which matches {found} of .* lists: MIG-77, MIG-78\."):
        find_devices(Demand(slots_per_trial=1))
    assert not find_devices(Demand(slots_per_trial=1, on_cpu=True)).gpus


def test_trials_of_no_slots_run_whatever_the_limit() -> None:
    devices = find_devices(Demand(slots_per_trial=0, on_cpu=False, max_slots=0))
    assert devices.slots
    assert not devices.gpus


@pytest.mark.parametrize("on_cpu", [True, False])
def test_trial_with_too_many_processes_is_refused(on_cpu: bool) -> None:
    with pytest.raises(ExperimentError, match=r"1,000,000,000 processes .* which has \d+ CPUs: at most \d+"):
        find_devices(Demand(slots_per_trial=10**9, on_cpu=on_cpu))


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "expected"), [("1", "1 [1] ['GPU-9f20']"), ("MIG-78", "MIG-78 [0] ['MIG-78']")])
def test_trial_sees_its_own_gpus(allowed: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    code = (
        "import os, determined as det; info = det.get_cluster_info(); "
        "print(os.environ['CUDA_VISIBLE_DEVICES'], info.slot_ids, info.gpu_uuids)"
    )
    experiment = run_project(tmp_path, entrypoint=["python3", "-c", code])
    assert run("experiment", "logs", experiment, 1).stdout.strip() == expected
