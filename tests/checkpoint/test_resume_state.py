"""What an exact resume needs has one type and a version, and every version so far is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, ResumeState, TrialState, read_checkpoint
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY, from_entry, to_entry
from det_lightning.checkpoint.format.resume_state import RESUME_VERSION
from det_lightning.checkpoint.safe_load import inspect_checkpoint, read_state, verify_checkpoint
from tests.checkpoint.made_checkpoints import assert_equal, forget_checksums, make_resume
from tests.trials import SmallTrial, seed_everything, weights_of


def fit(storage: Path, batches: int, **kwargs: Any) -> torch.Tensor:
    """Train up to a number of batches; return the weights."""
    seed_everything()
    with pytorch.init(enable_tensorboard_logging=False, hparams={"lr": 0.1}) as context:
        trial = SmallTrial(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        length = pytorch.Batch(batches)
        trainer.fit(max_length=length, checkpoint_policy="none", checkpoint_storage=storage, **kwargs)
    return weights_of(trial)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return a checkpoint that a run of 3 batches wrote, without checksums."""
    fit(tmp_path / "storage", 3)
    (name,) = CheckpointStorage(tmp_path / "storage").list_ids()
    forget_checksums(tmp_path / "storage" / name)
    return tmp_path / "storage" / name


def as_first_version(values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``resume.pth`` as releases wrote it that gave it no version."""
    first = {name: value for name, value in values.items() if name != "version"}
    return {**first, "settings": json.dumps(values["settings"])}


def ckpt_of_a_run(file: Path) -> dict[str, Any]:
    seed_everything()
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **flags)
    trainer.fit(TrialModule(SmallTrial, hparams={"lr": 0.1}))
    trainer.save_checkpoint(file)
    return read_state(file)


def weights_after_two_epochs(file: Path) -> torch.Tensor:
    seed_everything()
    module = TrialModule(SmallTrial, hparams={"lr": 0.1})
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **flags)
    trainer.fit(module, ckpt_path=str(file))
    return weights_of(module.trial)


def test_file_has_a_version(trained: Path) -> None:
    values = torch.load(trained / "resume.pth", weights_only=False)
    assert values["version"] == RESUME_VERSION == 2
    assert values["settings"] == {"hparams": {"lr": 0.1}, "experiment_config": None}


def test_what_is_read_is_what_was_written() -> None:
    resume = make_resume()
    assert_equal(ResumeState.from_dict(resume.to_dict(), "resume.pth"), resume)
    assert_equal(ResumeState.from_dict(as_first_version(resume.to_dict()), "resume.pth"), resume)


def test_file_without_version_resumes(trained: Path, tmp_path: Path) -> None:
    straight_on = fit(trained.parent, 5, latest_checkpoint=trained.name)
    torch.save(as_first_version(read_state(trained / "resume.pth")), trained / "resume.pth")
    content = read_checkpoint(trained)
    assert content.resume is not None
    assert content.resume.settings == {"hparams": {"lr": 0.1}, "experiment_config": None}
    assert torch.equal(fit(trained.parent, 5, latest_checkpoint=trained.name), straight_on)


def test_old_lightning_file_resumes(tmp_path: Path) -> None:
    ckpt = ckpt_of_a_run(tmp_path / "now.ckpt")
    entry = ckpt[TRIAL_KEY]
    # Earlier releases kept all of this in one dict, and no name.
    ckpt[TRIAL_KEY] = {
        "state": entry["state"],
        "extra": as_first_version(entry["resume"]),
        "load_data": entry["load_data"],
    }
    torch.save(ckpt, tmp_path / "earlier.ckpt")
    assert torch.equal(
        weights_after_two_epochs(tmp_path / "earlier.ckpt"), weights_after_two_epochs(tmp_path / "now.ckpt")
    )


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


@pytest.mark.parametrize("resume", [None, make_resume()])
def test_entry_holds_all_but_weights(resume: ResumeState | None) -> None:
    content = CheckpointContent(
        {"callbacks": {}}, TrialState(batches_trained=7), {"trial_cls_spec": "m:T"}, resume, name="one"
    )
    found = from_entry(to_entry(content), "the file")
    assert (found.state, found.trial_state, found.load_data) == (content.state, content.trial_state, content.load_data)
    assert_equal(found.resume, content.resume)
    assert (found.name, found.trial_class, found.has_weights, found.epochs_known) == ("one", "m:T", False, True)
