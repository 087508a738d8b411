"""What an import brings along. Lightning and torch are slow to import, and not everything needs them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning.checkpoint import CheckpointStorage
from tests.checkpoint.made_checkpoints import make_files
from tests.cli.exported import describe_trial

# Most tests start a Python of their own.
pytestmark = pytest.mark.slow

LIGHTNING = ["lightning_fabric", "pytorch_lightning"]
HEAVY = [*LIGHTNING, "numpy", "tensorboard", "torch", "torchmetrics"]


@functools.cache
def imported_with(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


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
        ("det_lightning.experiments.lifecycle", ["ray", "det_lightning.experiments.ray_cluster"]),
        ("det_lightning.pytorch", [*LIGHTNING, "sympy", "tensorboard", "torch.distributed.tensor", "torchmetrics"]),
        ("det_lightning.pytorch._trainer", ["tensorboard", "boto3"]),
        ("det_lightning.checkpoint", [*LIGHTNING, "tensorboard", "torchmetrics", "det_lightning.pytorch"]),
    ],
)
def test_import_brings_only_what_it_needs(module: str, without: list[str]) -> None:
    imported = imported_with(module)
    assert module in imported
    assert imported.isdisjoint(without)


@pytest.mark.parametrize("module", ["det_lightning", "det_lightning.cli", "det_lightning.pytorch"])
def test_readers_of_configurations_wait(module: str) -> None:
    assert imported_with(module).isdisjoint(["pydantic", "ruamel.yaml", "det_lightning.config"])


def test_configurations_need_little_else() -> None:
    imported = imported_with("det_lightning.config")
    with_all = {name for name in imported if name.startswith("det_lightning.") and ".config" not in name}
    assert with_all - imported_with("det_lightning") == {
        "det_lightning.checkpoint",
        "det_lightning.checkpoint.storage",
        "det_lightning.checkpoint.storage.storage_config",
        "det_lightning.files.file_kinds",
        "det_lightning.hyperparameters",
        "det_lightning.units",
    }


def test_trainer_imports_lightning() -> None:
    """The garbage collector rests meanwhile."""
    code = (
        "import gc, sys, det_lightning as det; det.pytorch.PyTorchTrial; print('pytorch_lightning' in sys.modules);"
        "collections = []; gc.callbacks.append(lambda phase, _: collections.append(phase)); det.pytorch.Trainer;"
        "print('pytorch_lightning' in sys.modules)\n"
        "print(len(collections) < 10, gc.isenabled())"  # an import of Lightning makes hundreds
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True", "True"]


# What only a checkpoint, a resume, a configuration, a search or a command needs.
NOT_YET = ["checkpoint.safe_load.reading", "config", "experiments", "testing", "cli"]


@pytest.mark.parametrize(
    ("api", "further"),
    [("determined", {"fastcrc", "filelock", "pathspec", "platformdirs"}), ("lightning", {"fastcrc", "pathspec"})],
)
def test_first_batch_imports_hardly_more(
    api: str, further: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    script = Path(__file__).with_name("first_batch.py")
    done = subprocess.run([sys.executable, script, api], capture_output=True, text=True, check=True, cwd=tmp_path)
    (line,) = (line for line in done.stdout.splitlines() if "det_lightning.engine.run " in line)
    imported = set(line.split())
    packages = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert packages - {"det_lightning"} == further
    assert imported.isdisjoint(f"det_lightning.{name}" for name in NOT_YET)


MISSING = "a-missing-file"


def modules_of_command(*arguments: str | Path) -> set[str]:
    """Run ``det-lightning checkpoint`` in a process of its own, and return the modules that it imports."""
    code = (
        "import sys\n"
        "from det_lightning.cli import main\n"
        f"sys.argv = ['det-lightning', 'checkpoint', *{[*map(str, arguments)]!r}]\n"
        "try:\n    main()\n"
        f"except SystemExit as e:\n    assert bool(e.code) is {MISSING in arguments}, e.code\n"
        "print('', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a storage with two checkpoints, of which a file of Determined's master names the first."""
    path = tmp_path_factory.mktemp("storage")
    storage = CheckpointStorage(path / "checkpoints")
    for checkpoint_id, steps in (("first", 3), ("second", 5)):
        storage.write(make_files(steps), checkpoint_id, code=path)
    (path / "trial.json").write_text(json.dumps(describe_trial(7, {"first": (3, 0.5)})))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "{storage}/checkpoints"),
        ("annotate", "{storage}/checkpoints", "{storage}/trial.json"),
        ("prune", "{storage}/checkpoints", "--dry-run"),
        ("prune", "{storage}/checkpoints", "--trial-best", "0", "--trial-latest", "1"),
        *[(command, MISSING) for command in ("show", "verify", "export", "merge")],
        ("import", MISSING, "{storage}/checkpoints"),
    ],
    ids=" ".join,
)
def test_command_without_weights_needs_no_torch(arguments: tuple[str, ...], storage: Path) -> None:
    imported = modules_of_command(*(argument.format(storage=storage) for argument in arguments))
    written = arguments[0] in ("annotate", "export", "import", "merge", "prune")
    assert f"det_lightning.cli.checkpoint_{'writing' if written else 'reading'}" in imported
    assert imported.isdisjoint([*HEAVY, "boto3"])
