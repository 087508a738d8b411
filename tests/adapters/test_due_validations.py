"""A run that goes on from a file of Lightning first validates, if the file was written before a validation was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning.adapters import TrialModule
from det_lightning.units import Batch
from tests.lightning import fit, pl
from tests.trials import EPOCH_LEN, SmallTrial, weights_of


class Validations(pl.Callback):
    """Notes after which batches a run validates."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.batches.append(pl_module.trial_run.state.batches_trained)


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
def test_a_resume_at_any_batch(arguments: dict[str, Any], flags: dict[str, Any], tmp_path: Path) -> None:
    straight, validations = TrialModule(SmallTrial, **arguments), Validations()
    each_batch = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)  # a batch makes two steps
    fit(straight, callbacks=[validations, each_batch], max_epochs=2, **flags)
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) == 2 * EPOCH_LEN
    for file in files:
        resumed, again = TrialModule(SmallTrial, **arguments), Validations()
        fit(resumed, file, callbacks=[again], max_epochs=2, **flags)
        saved_at = torch.load(file, weights_only=True)["global_step"] // 2
        assert again.batches == [batch for batch in validations.batches if batch >= saved_at]
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
    validations = Validations()
    fit(TrialModule(Failing), saving.ckpt_path, callbacks=[validations], max_epochs=3)
    assert validations.batches == [EPOCH_LEN, 2 * EPOCH_LEN, 3 * EPOCH_LEN]
