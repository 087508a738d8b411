"""A correct trial, broken in many ways: each defect is caught by the check for it, which names the culprit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from det_lightning.testing.checks import CHECKS, BadTrial, CheckFailed, NotCompared
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.reference import record_ours
from det_lightning.testing.training.trainings import TrialRuns
from tests.testing.changed_trials import CORRECT, Case
from tests.testing.defects import DEFECTS, HARMLESS, NOT_COMPARED
from tests.testing.recorded_trials import write_record

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_spawn")]

HPARAMS = {"lr": 0.02, "global_batch_size": 4}


def every(cases: dict[str, list[Case]]) -> pytest.MarkDecorator:
    """Return a parametrization by check and case."""
    pairs = [pytest.param(check, case, id=f"{check}: {case.name}") for check in cases for case in cases[check]]
    return pytest.mark.parametrize(("check", "case"), pairs)


def make_runs(source: str, folder: Path, hparams: dict[str, Any] = HPARAMS, **options: Any) -> TrialRuns:
    (folder / "model_def.py").write_text(source)
    return TrialRuns(TrialOptions("model_def:MyTrial", folder, hparams, **options))


def run_check(name: str, runs: TrialRuns) -> None:
    (check,) = (check for check in CHECKS if check.name == name)
    check.run(runs)


def run_case(check: str, case: Case, folder: Path, hparams: dict[str, Any] = HPARAMS, **options: Any) -> None:
    """Run a check on a changed trial; pytest shows the changes if the test fails."""
    print(case.describe_changes())
    run_check(check, make_runs(case.source, folder, hparams, **options))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the correct trial."""
    folder = tmp_path_factory.mktemp("reference")
    runs = make_runs(CORRECT, folder)
    write_record(record_ours(runs.source, runs.reference_settings), folder / "ref.json")
    return folder / "ref.json"


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> TrialRuns:
    return make_runs(CORRECT, tmp_path_factory.mktemp("correct"), reference=reference)


@pytest.mark.parametrize("check", DEFECTS)
def test_correct_trial_passes(correct: TrialRuns, check: str) -> None:
    run_check(check, correct)


@every(DEFECTS)
def test_defect_is_caught_and_named(check: str, case: Case, tmp_path: Path, reference: Path) -> None:
    with pytest.raises((CheckFailed, BadTrial)) as caught:
        run_case(check, case, tmp_path, reference=reference)
    message = str(caught.value)
    assert [pattern for pattern in case.says if not re.search(pattern, message)] == [], message


@every(HARMLESS)
def test_harmless_code_passes(check: str, case: Case, tmp_path: Path) -> None:
    run_case(check, case, tmp_path)


@every(NOT_COMPARED)
def test_nothing_to_compare_is_not_green(check: str, case: Case, tmp_path: Path) -> None:
    hparams = {"lr": 0.02} if "without a hyperparameter" in case.name else HPARAMS
    with pytest.raises(NotCompared, match=case.says[0]):
        run_case(check, case, tmp_path, hparams)
