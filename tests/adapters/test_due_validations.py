"""A run that goes on from a file of Lightning first validates, if the file was written before a validation was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.adapters import TrialModule
from det_lightning.units import Batch
from tests.adapters.training import trained
from tests.lightning import fit, pl
from tests.trials import EPOCH_LEN, SmallTrial, weights_of


class Watched(TrialModule):
    """Notes after which batches a run validates."""

    validated_after: tuple[int, ...] = ()

    def on_validation_start(self) -> None:
        self.validated_after += (self.trial_run.state.batches_trained,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ({}, {}),
        ({}, {"val_check_interval": 0.5}),
        ({}, {"check_val_every_n_epoch": None, "val_check_interval": 5}),
        ({"validation_period": Batch(3)}, {}),
    ],
)
def test_resume_at_any_batch_validates_where_a_straight_run_does(
    arguments: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    each_batch = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)  # a batch makes two steps
    straight = trained(Watched(SmallTrial, **arguments), max_epochs=2, callbacks=[each_batch], **flags)
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) == 2 * EPOCH_LEN
    for file in files:
        resumed = trained(Watched(SmallTrial, **arguments), file, max_epochs=2, **flags)
        saved_at = torch.load(file, weights_only=True)["global_step"] // 2
        assert [*resumed.validated_after] == [batch for batch in straight.validated_after if batch >= saved_at]
        assert torch.equal(weights_of(resumed.trial), weights_of(straight.trial))


def test_failed_validations_are_repeated(tmp_path: Path) -> None:
    class Failing(SmallTrial):
        fails = True

        def evaluate_batch(self, batch: Any) -> dict[str, Any]:
            if self.fails:
                raise ValueError("the validation fails")
            return super().evaluate_batch(batch)

    saving = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="the validation fails"):
        fit(TrialModule(Failing), callbacks=[saving])
    Failing.fails = False
    resumed = trained(Watched(Failing), saving.ckpt_path, max_epochs=3)
    assert resumed.validated_after == (EPOCH_LEN, 2 * EPOCH_LEN, 3 * EPOCH_LEN)
