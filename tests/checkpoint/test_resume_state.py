"""What an exact resume needs has one type and a version, and every version so far is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import ResumeState, read_checkpoint
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY
from det_lightning.checkpoint.format.resume_state import RESUME_VERSION
from det_lightning.checkpoint.safe_load import inspect_checkpoint, read_state, verify_checkpoint
from tests import lightning
from tests.checkpoint.made_checkpoints import fit, forget_checksums
from tests.trials import SmallTrial, make_data, weights_of


def as_first_version(values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``resume.pth`` as releases wrote it that gave it no version."""
    first = {name: value for name, value in values.items() if name != "version"}
    return {**first, "settings": json.dumps(values["settings"])}


def test_file_without_version_resumes(trained: Path) -> None:
    straight_on = fit(trained.parent, 5, latest_checkpoint=trained.name)
    values = torch.load(trained / "resume.pth", weights_only=False)
    assert values["version"] == RESUME_VERSION == 2
    assert values["settings"] == {"hparams": {"lr": 0.1}, "experiment_config": None}
    torch.save(as_first_version(values), trained / "resume.pth")
    content = read_checkpoint(trained)
    assert content.resume is not None
    assert content.resume.settings == values["settings"]
    assert torch.equal(fit(trained.parent, 5, latest_checkpoint=trained.name), straight_on)


class DrawsWithNumpy(SmallTrial):
    """Shuffles with generators of numpy."""

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(make_data(), batch_size=4, sampler=NumpySampler())


class NumpySampler(torch.utils.data.Sampler[int]):
    """A shuffle of one's own."""

    def __init__(self) -> None:
        self.old = np.random.RandomState(1)
        self.new = np.random.Generator(np.random.Philox(1))

    def __len__(self) -> int:
        return len(make_data())

    def __iter__(self) -> Iterator[int]:
        self.old.normal()
        return iter(self.new.permutation(len(self)).tolist())


def test_torch_reads_all_files_by_default(tmp_path: Path) -> None:
    """So code of users that opens ``state_dict.pth`` by itself goes on working; a resume stays exact."""
    straight_on = fit(tmp_path / "whole", 7, trial_class=DrawsWithNumpy)
    fit(tmp_path / "parts", 3, trial_class=DrawsWithNumpy)
    files = list(tmp_path.glob("parts/*/*.pth"))
    assert sorted(file.name for file in files) == ["resume.pth", "state_dict.pth"]
    for file in files:
        torch.load(file, weights_only=True)
    assert torch.equal(fit(tmp_path / "parts", 7, trial_class=DrawsWithNumpy, latest_checkpoint="last"), straight_on)
    state = torch.load(tmp_path / files[0].parent / "state_dict.pth")["rng_state"]["np_rng_state"]
    np.random.set_state(state)  # as Determined does


def test_file_with_arrays_resumes(trained: Path) -> None:
    """Earlier releases, and Determined, write the state of numpy's generator as an array."""
    straight_on = fit(trained.parent, 5, latest_checkpoint=trained.name)
    for name in ("state_dict.pth", "resume.pth"):
        values = torch.load(trained / name)
        for state in [values["rng_state"]] if "rng_state" in values else values["rng_states"]:
            kind, words, *rest = state["np_rng_state"]
            state["np_rng_state"] = (kind, np.array(words, np.uint32), *rest)
        torch.save(values, trained / name)
    forget_checksums(trained)
    assert torch.equal(fit(trained.parent, 5, latest_checkpoint=trained.name), straight_on)


def test_old_lightning_file_resumes(tmp_path: Path) -> None:
    hparams = {"lr": 0.1}
    lightning.fit(TrialModule(SmallTrial, hparams)).save_checkpoint(tmp_path / "now.ckpt")
    ckpt = read_state(tmp_path / "now.ckpt")
    entry = ckpt[TRIAL_KEY]
    # Earlier releases kept all of this in one dict, and no name.
    extra = as_first_version(entry["resume"])
    ckpt[TRIAL_KEY] = {"state": entry["state"], "extra": extra, "load_data": entry["load_data"]}
    torch.save(ckpt, tmp_path / "earlier.ckpt")
    modules = [TrialModule(SmallTrial, hparams) for _ in range(2)]
    for module, name in zip(modules, ("earlier.ckpt", "now.ckpt"), strict=True):
        lightning.fit(module, tmp_path / name, max_epochs=2)
    assert torch.equal(*(weights_of(module.trial) for module in modules))


def test_newer_version_is_refused(trained: Path) -> None:
    file = trained / "resume.pth"
    torch.save({**read_state(file), "version": 99, "something": "new"}, file)
    message = rf"{file} has version 99 .*reads versions up to {RESUME_VERSION}\. Update det_lightning"
    with pytest.raises(errors.InvalidCheckpointException, match=message):
        read_checkpoint(trained)
    (problem,) = inspect_checkpoint(trained)["problems"]
    assert verify_checkpoint(trained).problems == [problem]
    with pytest.raises(errors.InvalidCheckpointException, match=message):
        fit(trained.parent, 5, latest_checkpoint=trained.name)


def test_all_missing_entries_are_named() -> None:
    with pytest.raises(errors.IncompleteCheckpointError, match=r"'rng_states' is missing; .*'gradients' is missing"):
        ResumeState.from_dict({"trial_state": {}}, "resume.pth")
