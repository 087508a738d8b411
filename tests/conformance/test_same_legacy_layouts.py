"""Checkpoints of older releases: where the real determined still reads them, ours reads the same."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import layouts
from tests.checkpoint.layouts import HPARAMS, LAYOUTS, Layout
from tests.conformance.sides import SIDES, frozen, load_trial, loading_as_before_torch_2_6

BATCHES = 8


def load(side: str, directory: Path) -> Any:
    loaded = load_trial(side, directory)
    for file in directory.glob("code/*.py"):
        sys.modules.pop(file.stem, None)  # the real one leaves them behind, for the next test of such a module to find
    return loaded if isinstance(loaded, torch.nn.Module) else loaded.model


def state_after_loading(side: str, directory: Path) -> Any:
    """Begin to train from a checkpoint; return models, optimizers and schedulers as the first batch finds them."""
    api = importlib.import_module(f"{side}.pytorch")
    source = layouts.CODE.replace("determined.", f"{side}.").replace("import helper_module", "")
    namespace: dict[str, Any] = {"__name__": f"model_def_of_{side}"}
    exec(source.replace("helper_module.WIDTH", "2"), namespace)
    old_trial: Any = namespace["OldTrial"]
    found: list[Any] = []

    class Recorded(old_trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if not found:
                wrapped = (self.context.models, self.context.optimizers, self.context.lr_schedulers)
                found.extend(frozen([one.state_dict() for one in kind]) for kind in wrapped)
            return super().train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)

    fit = {"max_length": api.Batch(BATCHES + 2), "checkpoint_policy": "none", "latest_checkpoint": directory.name}
    with loading_as_before_torch_2_6(side), api.init(hparams=HPARAMS, enable_tensorboard_logging=False) as context:
        api.Trainer(Recorded(context), context).fit(**fit)
    return found


@pytest.mark.parametrize(
    "layout", [one for one in LAYOUTS if one.state_file == "state_dict.pth" and one.described_by], ids=str
)
def test_loaded_weights_are_the_same(layout: Layout, tmp_path: Path) -> None:
    directory = layouts.write(tmp_path / "old", layout, BATCHES)
    real, ours = (load(side, directory) for side in SIDES)
    assert frozen(ours.state_dict()) == frozen(real.state_dict())


@pytest.mark.parametrize("single_keys", [True, False])
def test_model_before_0_12_13_is_returned(single_keys: bool, tmp_path: Path) -> None:
    layout = Layout("0.12", "state_dict.pth", single_keys, None, described_by="metadata.json")
    directory = layouts.write(tmp_path / "old", layout, BATCHES, layouts.FUNCTIONAL_CODE)
    real, ours = (load(side, directory) for side in SIDES)
    assert (type(ours), frozen(ours.state_dict())) == (type(real), frozen(real.state_dict()))


# Without any progress the real one fails.
@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one.progress_file], ids=str)
def test_a_run_begins_with_the_same_state(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    directory = layouts.write(tmp_path / "determined/old", layout, BATCHES)
    real, ours = (state_after_loading(side, directory) for side in SIDES)
    assert ours == real
