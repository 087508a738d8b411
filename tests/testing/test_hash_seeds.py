"""A trial that depends on the order of a set trains differently in each process, and is told so.

The other defects are tried in forks of one warm process, which all have its hash seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.testing.checks import CheckFailed
from det_lightning.testing.checks.training import is_deterministic_elsewhere
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.trainings import TrialRuns
from tests.testing.changed_trials import case

pytestmark = pytest.mark.slow

ORDERED = case("order of a set", r"(?s)PYTHONHASHSEED.*metric loss.*LINE: \{'a', .*sort the set")(
    above="ORDER = list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})",
    loss="self.loss(batch) * (1 + sum(2**i * ord(letter) for i, letter in enumerate(ORDER)) / 1e4)",
)


def test_order_of_a_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(ORDERED.source)
    runs = TrialRuns(TrialOptions("model_def:MyTrial", tmp_path, {"lr": 0.02, "global_batch_size": 4}))
    with pytest.raises(CheckFailed, match=ORDERED.says[0]):
        is_deterministic_elsewhere(runs)
    runs.close()
