"""Commands and checkpoints on a GPU, from one end to the other; most tests run on the CPU where no GPU is visible."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.core import DistributedContext
from tests.conformance.trials import Basic, of_side

pytestmark = pytest.mark.slow

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_gpu = pytest.mark.parametrize("device", [ON_GPU])
on_both = pytest.mark.parametrize("device", ["cpu", ON_GPU])

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mnist"


@pytest.fixture(autouse=True)
def visible_device(device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a trial takes the GPU that is here; hide it with CUDA_VISIBLE_DEVICES= to test on the CPU")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "mnist"))


def run(project: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=project, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@on_gpu
def test_an_experiment_with_one_slot_completes(project: Path) -> None:
    short = "searcher.max_length={epochs: 1}"
    run(project, "det_lightning.cli", "run", "const.yaml", "--config", short, "--slots", "1")
    shown = run(project, "det_lightning.cli", "experiment", "show", "experiments/mnist-1", "--json")
    assert json.loads(shown)["state"] == "COMPLETED"


@on_gpu
def test_the_checks_of_a_trial_pass(project: Path) -> None:
    deterministic = "import torch\ntorch.use_deterministic_algorithms(True, warn_only=True)\n"
    (project / "conftest.py").write_text(deterministic)
    trial = ("--trial", "model_def:MnistTrial", "--trial-config", "const.yaml", "--trial-quick")
    out = run(project, "pytest", "-q", *trial, "-p", "no:cacheprovider")
    assert "failed" not in out


def train(storage: Path, batches: int, kind: Any = None, distributed: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    with pytorch.init(distributed=distributed, enable_tensorboard_logging=False) as context:
        trial = (kind or of_side(pytorch, Basic))(context)
        checkpoints = DeterminedCheckpoint(storage, policy="none", period=pytorch.Batch(3), **options)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        trainer.fit(max_length=pytorch.Batch(batches), checkpoints=checkpoints)
        assert {parameter.device for parameter in trial.model.parameters()} == {context.device}
    return trial


def newest(storage: Path) -> Path:
    return max(storage.glob("*/metadata.json"), key=lambda path: path.stat().st_mtime_ns).parent


@on_both
@pytest.mark.parametrize("async_write", [False, True])
def test_a_checkpoint_holds_the_weights_that_it_was_written_with(tmp_path: Path, async_write: bool) -> None:
    trial = train(tmp_path, 7, async_write=async_write)
    saved = torch.load(newest(tmp_path) / "state_dict.pth", map_location="cpu", weights_only=False)
    weights = saved["models_state_dict"][0]
    assert all(torch.equal(weights[name], value.cpu()) for name, value in trial.model.state_dict().items())
    assert len(list(tmp_path.glob("*/state_dict.pth"))) == 3


READERS = {
    "det_lightning": "det_lightning.pytorch",
    "determined": pytest.param("determined.pytorch", marks=pytest.mark.determined),
}


@on_both
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_either_system_loads_it_without_a_gpu(tmp_path: Path, reader: str) -> None:
    trial = train(tmp_path / "storage", 4)
    Path("load.py").write_text(LOAD.format(api=reader, path=newest(tmp_path / "storage")))
    subprocess.run(
        [sys.executable, "load.py"], check=True, timeout=200, env={**os.environ, **PATHS, "CUDA_VISIBLE_DEVICES": ""}
    )
    loaded = torch.load("weights.pth")
    assert all(torch.equal(value.cpu(), loaded[name]) for name, value in trial.model.state_dict().items())


PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, [str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH")]))}
LOAD = """
import importlib, sys, torch
from tests.conformance.trials import Basic, of_side
api = importlib.import_module("{api}")
options = {{}} if "det_lightning" in api.__name__ else {{"map_location": "cpu", "weights_only": False}}
trial = api.load_trial_from_checkpoint_path("{path}", trial_class=of_side(api, Basic), torch_load_kwargs=options)
torch.save(trial.model.state_dict(), "weights.pth")
"""


@on_both
def test_one_process_of_a_process_group_trains_as_one_alone(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(tmp_path / "alone", 7)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    for name in ("", "LOCAL_", "GROUP_"):
        monkeypatch.setenv(f"{name}RANK", "0")
        monkeypatch.setenv(f"{name}WORLD_SIZE", "1")
    try:
        in_group = train(tmp_path / "storage", 7, distributed=DistributedContext.from_torch_distributed())
    finally:
        torch.distributed.destroy_process_group()
    weights = in_group.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in alone.model.state_dict().items())


class WithoutDropout(of_side(pytorch, Basic)):  # type: ignore[misc]
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.model[1].p = 0.0
        self.predict = self.model

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self.predict(batch[0]) - batch[1]) ** 2).mean()


class Compiled(WithoutDropout):
    """Kernels that torch generates, in CUDA graphs; on the CPU, where kernels need a compiler, only traced."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        options: Any = {"mode": "reduce-overhead"} if context.device.type == "cuda" else {"backend": "eager"}
        self.predict = torch.compile(self.model, **options)


@on_both
def test_a_compiled_model_trains_as_the_model_itself(tmp_path: Path) -> None:
    plain, compiled = (train(tmp_path, 20, kind=kind).model.state_dict() for kind in (WithoutDropout, Compiled))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
