"""The example reads digits, as an experiment; its SavedModel is in the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from tests.experiments.running import events_of, run

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "estimator"


def test_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("run", EXAMPLE / "const.yaml", EXAMPLE, "--experiments", tmp_path / "experiments", timeout_s=400)
    experiment = tmp_path / "experiments" / "digits-estimator-1"
    validations = events_of(experiment, "validation")
    assert [event["steps_completed"] for event in validations] == [60, 120, 180, 240]
    assert max(event["metrics"]["accuracy"] for event in validations) > 0.9
    assert [*tmp_path.rglob("digits/*/saved_model.pb")]
    assert [*(tmp_path / "cache").rglob("elements.tfrecord")]
