"""A correct trial, broken in many ways: each defect is caught by the check for it, which names the culprit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from det_lightning.testing.checks import CHECKS, BadTrial, CheckFailed, NotCompared
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.reference import record_ours
from det_lightning.testing.training.runs import TrialRuns
from tests.testing.defects import CORRECT, DETERMINISTIC, PROCESSES, SAMPLES, Defect
from tests.testing.harmless_code import HARMLESS, NOT_COMPARED
from tests.testing.process_defects import PROCESS_DEFECTS
from tests.testing.state_defects import STATE_DEFECTS
from tests.testing.training_defects import TRAINING_DEFECTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_spawn")]

HPARAMS = {"lr": 0.02, "global_batch_size": 4}
DEFECTS = [*STATE_DEFECTS, *TRAINING_DEFECTS, *PROCESS_DEFECTS]


def runs_of(source: str, folder: Path, **options: Any) -> TrialRuns:
    (folder / "model_def.py").write_text(source)
    return TrialRuns(TrialOptions("model_def:MyTrial", folder, HPARAMS, **options))


def run_check(name: str, runs: TrialRuns) -> None:
    (check,) = (check for check in CHECKS if check.name == name)
    check.run(runs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the correct trial."""
    folder = tmp_path_factory.mktemp("reference")
    runs = runs_of(CORRECT, folder)
    record_ours(runs.source, runs.reference_settings).write(folder / "ref.json")
    return folder / "ref.json"


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> TrialRuns:
    return runs_of(CORRECT, tmp_path_factory.mktemp("correct"), reference=reference)


@pytest.mark.parametrize("check", dict.fromkeys(defect.check for defect in DEFECTS))
def test_correct_trial_passes(correct: TrialRuns, check: str) -> None:
    run_check(check, correct)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_caught_and_named(defect: Defect, tmp_path: Path, reference: Path) -> None:
    runs = runs_of(defect.source(), tmp_path, reference=reference)
    with pytest.raises((CheckFailed, BadTrial)) as caught:
        run_check(defect.check, runs)
    runs.close()
    message = str(caught.value)
    assert all(re.search(pattern, message) for pattern in defect.says), message


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_code_passes(name: str, tmp_path: Path) -> None:
    check, changes = HARMLESS[name]
    runs = runs_of(Defect(name, check, (), changes).source(), tmp_path)
    run_check(check, runs)
    runs.close()


DRAWING = """class Drawing(torch.utils.data.Sampler):
    def __len__(self):
        return 40

    def __iter__(self):
        return iter([0, 1, 2, 3, *({generator}.permutation(36) + 4).tolist()])


class Best("""


def drawing_from(generator: str) -> str:
    """Return the trial with a sampler whose order differs from the second batch on."""
    changes = {
        "STEPS = 0": "import os\n\nSTEPS = 0",
        "class Best(": DRAWING.format(generator=generator),
        "shuffle=True": "sampler=Drawing()",
    }
    return Defect("sampler", PROCESSES, (), changes).source()


def test_unseeded_sampler_is_blamed(tmp_path: Path) -> None:
    runs = runs_of(drawing_from("np.random.default_rng()"), tmp_path)
    with pytest.raises(NotCompared, match=r"differ already, first in the data.* deterministic under a seed"):
        run_check(PROCESSES, runs)
    with pytest.raises(CheckFailed, match=r"not seeded: np.random.default_rng"):
        run_check(DETERMINISTIC, runs)
    runs.close()


def test_sampler_of_each_process_is_blamed(tmp_path: Path) -> None:
    runs = runs_of(drawing_from("np.random.default_rng(os.getpid())"), tmp_path)
    run_check(DETERMINISTIC, runs)
    with pytest.raises(NotCompared, match="two processes train on other samples than one in batch 1"):
        run_check(PROCESSES, runs)
    with pytest.raises(CheckFailed, match="Two processes train on other samples than one, first in batch 1"):
        run_check(SAMPLES, runs)
    runs.close()


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_nothing_to_compare_is_not_green(name: str, tmp_path: Path) -> None:
    check, reason, changes = NOT_COMPARED[name]
    hparams = {"lr": 0.02} if "without" in name else HPARAMS
    (tmp_path / "model_def.py").write_text(Defect(name, check, (), changes).source())
    runs = TrialRuns(TrialOptions("model_def:MyTrial", tmp_path, hparams))
    with pytest.raises(NotCompared, match=reason):
        run_check(check, runs)
    runs.close()


def test_there_are_enough_defects() -> None:
    assert len(DEFECTS) >= 25
