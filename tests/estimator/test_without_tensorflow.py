"""Without TensorFlow the package is imported as far as that goes, and says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import environment

# None in sys.modules is how Python is told that a module is not there.
CODE = """
import sys
sys.modules["tensorflow"] = None
from det_lightning.estimator import EstimatorTrial, EstimatorTrialContext, MetricReducer
type("T", (EstimatorTrial,), {})
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE + code], capture_output=True, text=True, env=environment())


@pytest.mark.slow
def test_trials_can_be_defined() -> None:
    done = run("")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RunHook", "EstimatorModule", "init", "load_estimator_from_checkpoint_path"])
def test_other_names_say_what_to_install(name: str) -> None:
    *_, error = run(f"from det_lightning.estimator import {name}").stderr.splitlines()
    assert error.startswith("ModuleNotFoundError: ")
    assert "Estimators need TensorFlow 2.15" in error
    assert "pip install -e '.[estimator]'" in error
