"""What an import brings along. Lightning and torch are slow to import, and not everything needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIGHTNING = ["lightning_fabric", "pytorch_lightning"]
HEAVY = [*LIGHTNING, "numpy", "tensorboard", "torch", "torchmetrics"]


def imported_with(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("det_lightning", HEAVY),
        ("det_lightning.errors", HEAVY),
        ("det_lightning.units", HEAVY),
        ("det_lightning.core", HEAVY),
        ("det_lightning.testing.plugin", [*HEAVY, "jinja2", "yaml", "det_lightning.pytorch"]),
        ("det_lightning.porting", [*HEAVY, "libcst"]),
        ("det_lightning.config", HEAVY),
        ("det_lightning.experiments.experiment", ["ray", "det_lightning.experiments.ray_cluster"]),
        ("det_lightning.pytorch", [*LIGHTNING, "sympy", "tensorboard", "torch.distributed.tensor", "torchmetrics"]),
        ("det_lightning.pytorch._trainer", ["tensorboard", "boto3"]),
        ("det_lightning.checkpoint", [*LIGHTNING, "tensorboard", "torchmetrics", "det_lightning.pytorch"]),
    ],
)
def test_an_import_does_not_bring_what_it_does_not_need(module: str, without: list[str]) -> None:
    imported = imported_with(module)
    assert module in imported
    assert imported.isdisjoint(without)


@pytest.mark.parametrize(
    "module", ["det_lightning", "det_lightning.cli", pytest.param("det_lightning.pytorch", marks=pytest.mark.slow)]
)
def test_the_readers_of_configurations_wait_until_one_is_read(module: str) -> None:
    assert imported_with(module).isdisjoint(["pydantic", "ruamel.yaml", "det_lightning.config"])


def test_reading_a_configuration_needs_little_else_of_the_package() -> None:
    imported = imported_with("det_lightning.config")
    with_all = {name for name in imported if name.startswith("det_lightning.") and ".config" not in name}
    assert with_all - imported_with("det_lightning") == {
        "det_lightning.checkpoint",
        "det_lightning.checkpoint.storage",
        "det_lightning.checkpoint.storage.storage_config",
        "det_lightning.units",
    }


@pytest.mark.slow
def test_lightning_is_imported_when_the_trainer_is_asked_for() -> None:
    code = (
        "import sys, det_lightning as det; det.pytorch.PyTorchTrial; print('pytorch_lightning' in sys.modules);"
        "det.pytorch.Trainer; print('pytorch_lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("command", ["ls", "prune"])
def test_a_command_that_reads_no_weights_does_not_import_torch(command: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from det_lightning.cli import main\n"
        f"sys.argv = ['det-lightning', 'checkpoint', {command!r}, {str(tmp_path)!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as e:\n    assert not e.code, e.code\n"
        "print('', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert f"det_lightning.cli.checkpoint_{'reading' if command == 'ls' else 'writing'}" in imported
    assert imported.isdisjoint([*HEAVY, "boto3"])
