"""Which package Lightning is imported from, and programs that mix both; these tests need both of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from det_lightning.adapters import TrialModule
from det_lightning.adapters.lightning_package import OTHER
from tests.adapters import other_releases
from tests.warm_python import VARIABLES

BOTH = ("pytorch_lightning", "lightning")

pytestmark = [
    pytest.mark.both_packages,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in BOTH),
        reason="lightning is not installed; run tox -e lightning",
    ),
]


def run(code: str, directory: Path, package: str = "") -> str:
    """Return what a script prints."""
    script = directory / "script.py"
    script.write_text(code)
    environment = {**os.environ, **VARIABLES, "DET_LIGHTNING_PACKAGE": package}
    done = subprocess.run([sys.executable, script], cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


SHOW = """
import sys
print(TrialModule.__mro__[3].__module__, *sorted({'lightning', 'pytorch_lightning'} & sys.modules.keys()))
"""


@pytest.mark.parametrize(("before", "package"), [("", BOTH[0]), ("exec('import lightning')", BOTH[1])])
def test_an_imported_package_is_chosen(before: str, package: str, tmp_path: Path) -> None:
    module = "lightning.pytorch.core.module" if package == "lightning" else "pytorch_lightning.core.module"
    shown = run(f"{before}\nfrom det_lightning.adapters import TrialModule{SHOW}", tmp_path)
    assert shown.strip() == f"{module} {package}"


def test_a_later_import_of_lightning_counts(tmp_path: Path) -> None:
    code = """
from det_lightning.pytorch import Epoch, Trainer, init
import lightning as L
import sys
from tests.trials import SmallTrial

with init() as context:
    stopping = L.pytorch.callbacks.EarlyStopping("validation_loss", patience=0, mode="max")
    trainer = Trainer(SmallTrial(context), context, callbacks=[stopping])
    trainer.fit(max_length=Epoch(5), validation_period=Epoch(1), checkpoint_storage="checkpoints")
print(stopping.stopped_epoch, "pytorch_lightning" in sys.modules)
"""
    assert run(code, tmp_path).strip() == "1 False"


def test_mixtures_are_refused(tmp_path: Path) -> None:
    code = """
import pytorch_lightning as pl
from det_lightning.adapters import TrialModule
import lightning as L
from tests.trials import SmallTrial

class Own(L.Callback):
    pass

def fit(**flags):
    try:
        pl.Trainer(**flags, enable_model_summary=False).fit(module)
    except Exception as error:
        print(type(error).__name__, error)

class Foreign(L.Callback):
    pass
Foreign.__module__ = "optuna_integration.pytorch_lightning"

module = TrialModule(SmallTrial)
fit(callbacks=[Foreign()])
fit(callbacks=[L.pytorch.callbacks.EarlyStopping("loss"), Own()])
fit(logger=L.pytorch.loggers.CSVLogger("logs"))
fit(profiler=L.pytorch.profilers.SimpleProfiler())
"""
    printed = run(code, tmp_path)
    assert printed.count("UnsupportedTrainerFlags") == 4
    of_library = "Foreign of optuna_integration, a Callback of lightning: the trainer is from pytorch_lightning"
    assert f"{of_library}, and must be from lightning too. Train with lightning: import lightning.pytorch" in printed
    way_out = "of lightning: the trainer is from pytorch_lightning, so write `from pytorch_lightning.callbacks import"
    for wrong in (
        f"EarlyStopping, {way_out} EarlyStopping`",
        f"Own, a Callback {way_out} Callback`",
        "write `from pytorch_lightning.loggers import CSVLogger`",
        "write `from pytorch_lightning.profilers import SimpleProfiler`",
    ):
        assert wrong in printed


def test_a_module_warns_of_a_mixture(caplog: pytest.LogCaptureFixture) -> None:
    importlib.import_module(OTHER)
    TrialModule(other_releases.WithoutDropout)
    assert f"a trainer of {OTHER} refuses the module. Import Lightning as" in caplog.text


def test_packages_share_checkpoints(tmp_path: Path) -> None:
    other_releases.write(tmp_path / "own")
    code = """
from pathlib import Path
from tests.adapters import other_releases

other_releases.write(Path("theirs"))
other_releases.check(Path("own"))
"""
    assert run(code, tmp_path, OTHER).count("0.0e+00") == 2
    files = []
    for archive in ("own", "theirs"):
        with tarfile.open(tmp_path / archive) as packed:
            packed.extractall(tmp_path / f"{archive}_files", filter="data")
        folder = tmp_path / f"{archive}_files"
        assert [other_releases.difference(folder / name) for name in other_releases.NAMES] == [0, 0]
        files.append(str(torch.load(folder / "lightning.ckpt", weights_only=True)))
    assert files[0] == files[1]
