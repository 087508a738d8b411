"""A trial that depends on the order of a set trains differently in each process, and is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.testing.checks import CheckFailed
from det_lightning.testing.checks.training import is_deterministic_elsewhere
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.runs import TrialRuns
from tests.testing.defects import CORRECT, before_loss

pytestmark = pytest.mark.slow


def test_order_of_a_set_is_named(tmp_path: Path) -> None:
    source = CORRECT.replace("STEPS = 0", f"STEPS = 0\nORDER = list({{{', '.join(map(repr, 'abcdefgh'))}}})")
    for old, new in before_loss("pass", "self.loss(batch) * (1 + ORDER.index('a') + 8 * ORDER.index('b'))").items():
        source = source.replace(old, new)
    (tmp_path / "model_def.py").write_text(source)
    runs = TrialRuns(TrialOptions("model_def:MyTrial", tmp_path, {"lr": 0.02, "global_batch_size": 4}))
    with pytest.raises(CheckFailed, match=r"(?s)PYTHONHASHSEED.*metric loss.*model_def.py:\d+: \{'a', .*sort the set"):
        is_deterministic_elsewhere(runs)
    runs.close()
