"""Without TensorFlow the package is imported as far as that goes, and says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import environment

# None in sys.modules is how Python is told that a module is not there.
WITHOUT = "import sys; sys.modules['tensorflow'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, env=environment())


@pytest.mark.slow
def test_trials_can_be_defined() -> None:
    names = "EstimatorTrial, EstimatorTrialContext, MetricReducer"
    done = run(f"from det_lightning.estimator import {names}; type('T', (EstimatorTrial,), {{}})")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RunHook", "EstimatorModule", "init", "load_estimator_from_checkpoint_path"])
def test_missing_tensorflow_is_named(name: str) -> None:
    done = run(f"from det_lightning.estimator import {name}")
    assert done.returncode == 1
    assert "ModuleNotFoundError: Estimators need TensorFlow 2.15" in done.stderr
    assert "pip install -e '.[estimator]'" in done.stderr
