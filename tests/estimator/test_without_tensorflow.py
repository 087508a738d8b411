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
for name in ("RunHook", "EstimatorModule", "init", "load_estimator_from_checkpoint_path"):
    try:
        exec(f"from det_lightning.estimator import {name}")
    except ModuleNotFoundError as error:
        print("Estimators need TensorFlow 2.15" in str(error), "pip install -e '.[estimator]'" in str(error))
"""


@pytest.mark.slow
def test_trials_can_be_defined_but_not_run() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines() == ["True True"] * 4, done.stderr
