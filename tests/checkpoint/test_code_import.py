"""The code of a checkpoint is what was written, and nothing else of it is imported."""

from __future__ import annotations

import json
import logging
import py_compile
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState, read_checkpoint
from det_lightning.checkpoint.format.layout import read_json
from det_lightning.checkpoint.safe_load import verify_checkpoint
from det_lightning.importing import import_only, load_class
from det_lightning.pytorch import PyTorchTrial, load_trial_from_checkpoint_path
from tests.checkpoint.made_checkpoints import LOAD_DATA, forget_checksums

TRIAL = """
import torch
from det_lightning import pytorch
import a_package.inner, a_namespace.inner

class MyTrial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.said = a_package.inner.SAID + a_namespace.inner.SAID

    def train_batch(self, batch, epoch_idx, batch_idx): ...
    def evaluate_batch(self, batch): ...
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...
"""
RUNS = "open('the code ran', 'w').close()\n"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    code = tmp_path / "project"
    files = {"model_def.py": TRIAL, "a_package/__init__.py": "", "a_package/inner.py": "SAID = 'as '\n"}
    for name, content in {**files, "a_namespace/inner.py": "SAID = 'written'\n"}.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(content)
    load_data = {**LOAD_DATA, "trial_cls_spec": "model_def:MyTrial", "hparams": {}, "experiment_config": None}
    state = {"models_state_dict": [{"weight": torch.ones(1, 1)}], "callbacks": {}}
    storage = CheckpointStorage(tmp_path / "storage")
    name = storage.write(CheckpointContent(state, TrialState(), load_data), code=code)
    shutil.rmtree(code)
    return tmp_path / "storage" / name


def plant_bytecode(source: Path, content: str) -> None:
    """Write bytecode of ``content`` that the import system takes for that of ``source``."""
    planted = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    other = source.with_name("other.py")
    other.write_text(content)
    py_compile.compile(str(other), cfile=str(planted), doraise=True)
    other.unlink()
    header = struct.pack("<II", int(source.stat().st_mtime), source.stat().st_size)
    planted.write_bytes(planted.read_bytes()[:8] + header + planted.read_bytes()[16:])


def test_import_leaves_no_bytecode(checkpoint: Path) -> None:
    before = sorted(checkpoint.rglob("*"))
    for trusted in (False, True):
        assert load_trial_from_checkpoint_path(checkpoint, trusted=trusted).said == "as written"
    assert sorted(checkpoint.rglob("*")) == before
    assert not [name for name in sys.modules if name.startswith(("model_def", "a_package"))]


Change = Callable[[Path], object]
DAMAGE: dict[str, tuple[Change, str]] = {
    "longer": (lambda code: (code / "model_def.py").write_text(RUNS + TRIAL), "model_def.py has .* bytes in place of"),
    "one byte": (lambda code: (code / "a_package/inner.py").write_text("SAID = 'at '\n"), "a_package/inner.py has the"),
    "missing": (lambda code: (code / "a_package/inner.py").unlink(), "a_package/inner.py is missing"),
    "a link": (lambda code: replace_by_link(code / "model_def.py"), "model_def.py is a link"),
    "all of it a link": (lambda code: replace_by_link(code), "model_def.py is a link"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_changed_code_is_not_imported(damage: Change, said: str, checkpoint: Path) -> None:
    damage(checkpoint / "code")
    problem = f"code/{said}"
    with pytest.raises(errors.IncompleteCheckpointError, match=problem):
        load_trial_from_checkpoint_path(checkpoint)
    assert not Path("the code ran").exists()
    assert any(problem[:20] in found for found in verify_checkpoint(checkpoint).problems)


def replace_by_link(path: Path) -> None:
    """Move a file or directory to the working directory, which belongs to the test, and leave a link to it."""
    elsewhere = Path.cwd() / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


PLANTED: dict[str, Change] = {
    "code/torch.py": lambda file: file.write_text(RUNS),
    "code/model_def.abi3.so": lambda file: file.write_bytes(b"\x7fELF of another"),
    "code/a_namespace/__init__.py": lambda file: file.write_text(RUNS),
    "code/link.py": lambda file: file.symlink_to("model_def.py"),
    "code/__pycache__/model_def.": lambda file: plant_bytecode(file.parents[1] / "model_def.py", RUNS + TRIAL),
}


@pytest.mark.parametrize("name", PLANTED)
def test_unlisted_files_are_not_imported(name: str, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    PLANTED[name](checkpoint / name)
    with caplog.at_level(logging.WARNING):
        assert load_trial_from_checkpoint_path(checkpoint).said == "as written"
    assert name in caplog.text
    assert not Path("the code ran").exists()
    (problem,) = verify_checkpoint(checkpoint).problems
    assert name in problem
    assert "is not listed in metadata.json" in problem


def test_code_cannot_import_unlisted_files(checkpoint: Path) -> None:
    (checkpoint / "code" / "added.py").write_text(RUNS)
    files = [checkpoint / "code" / "model_def.py"]
    with import_only(checkpoint / "code", files), pytest.raises(ModuleNotFoundError):
        load_class("added:X")
    assert not Path("the code ran").exists()
    shutil.copy(checkpoint / "state_dict.pth", checkpoint / "lightning.pth")
    problems = verify_checkpoint(checkpoint).problems
    assert len(problems) == 2
    assert "lightning.pth is not listed in metadata.json" in "".join(problems)


def test_no_manifest_imports_all_code(checkpoint: Path) -> None:
    forget_checksums(checkpoint)
    inner = checkpoint / "code/a_package/inner.py"
    inner.write_text("SAID = 'now '\n")
    assert load_trial_from_checkpoint_path(checkpoint).said == "now written"
    assert not list(checkpoint.rglob("__pycache__"))
    replace_by_link(inner)
    with pytest.raises(ValueError, match=r"No module named 'a_package.inner'.*links.*code/a_package/inner\.py"):
        load_trial_from_checkpoint_path(checkpoint)


def test_trial_class_imports_nothing(checkpoint: Path) -> None:
    (checkpoint / "code/model_def.py").write_text(RUNS)
    with pytest.raises(errors.IncompleteCheckpointError, match=r"code/model_def\.py"):
        load_trial_from_checkpoint_path(checkpoint)
    forget_checksums(checkpoint)
    namespace: dict[str, Any] = {}
    alone = TRIAL.replace("import a_package.inner, a_namespace.inner", "").replace("        self.said", "        #")
    exec(alone, namespace)
    assert isinstance(load_trial_from_checkpoint_path(checkpoint, trial_class=namespace["MyTrial"]), PyTorchTrial)
    assert not Path("the code ran").exists()


# metadata.json


def change_metadata(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "metadata.json"
    path.write_text(json.dumps({**read_json(path), **changes}))


@pytest.mark.parametrize("changes", [{"files": {}}, {"added": 1}, {"metadata_crc32c": "00000000"}])
def test_change_of_metadata_is_damage(changes: dict[str, Any], checkpoint: Path) -> None:
    assert verify_checkpoint(checkpoint).problems == []
    change_metadata(checkpoint, **changes)
    assert any("the entries of metadata.json have the checksum" in p for p in verify_checkpoint(checkpoint).problems)
    for read in (read_checkpoint, load_trial_from_checkpoint_path):
        with pytest.raises(errors.IncompleteCheckpointError, match=r"the entries of metadata\.json have the checksum"):
            read(checkpoint)


def test_listing_ignores_damaged_metadata(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = CheckpointStorage(checkpoint.parent)
    change_metadata(checkpoint, steps_completed=10**9)
    assert storage.newest() == str(checkpoint)
    info = storage.info(checkpoint.name)
    assert (info.complete, info.metadata) == (True, {})
    assert f"The metadata of {checkpoint} is damaged" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), 1e300, "ü\ud800", {"1": [None, True]}, {1: (2,)}, Path("x"), 10**400])
def test_checksum_matches_after_reading(value: Any, tmp_path: Path) -> None:
    files = CheckpointContent({}, TrialState(), {"hparams": None, "experiment_config": None, "trial_cls_spec": "a:B"})
    files.notes["value"] = value
    checkpoint = tmp_path / CheckpointStorage(tmp_path).write(files)
    assert "metadata_crc32c" in read_json(checkpoint / "metadata.json")
    assert verify_checkpoint(checkpoint).problems == []
