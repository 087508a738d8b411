"""What an exact resume needs has one type and a version: every version so far is read, and wrong values are named."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import ResumeState, read_checkpoint
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY, to_lightning
from det_lightning.checkpoint.format.resume_state import RESUME_VERSION
from det_lightning.checkpoint.safe_load import inspect_checkpoint, read_state, verify_checkpoint
from tests import lightning
from tests.checkpoint.made_checkpoints import fit, forget_checksums, make_state, write_checkpoint
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


# Values are checked, not only their types: what is wrong is named before training goes on


def change(file: Path, path: str, value: Any) -> None:
    """Replace the value at a path such as ``rng_states.0.cpu_rng_state`` in a file."""
    content = read_state(file)
    target: Any = content
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        target = target[part]
    if value is DELETED:
        del target[last]
    else:
        target[last] = value
    torch.save(content, file)


DELETED = object()
DEEP = {"deep": json.loads("[" * 120 + "]" * 120)}


WRONG_RESUME_VALUES: dict[str, list[Any]] = {
    "trial_state": [[1]],
    "trial_state.batches_trained": [10**15],
    "trial_state.epochs_trained": ["two"],
    "rng_states": [{}, [], [3]],
    "journals": [None],
    "journals.0.0.first_batch": [-1, 10**400],
    "positions": [3, [{}, {}]],
    "positions.0.training.drawn": [-1],
    "positions.0.training.samplers": [[1]],
    "positions.0.validation": [{}],
    "optimizer_steps": ["5", float("nan")],
    "gradients": [5, [{"weight": "ones"}]],
    "precision": [[1]],
    "world_size": [0, 10**9, 2],
    "settings": ['{"hparams": {}}', {"hparams": [1]}, {"hparams": {"lr": torch.ones(2)}}, {"experiment_config": DEEP}],
    "version": ["two"],
}


@pytest.mark.parametrize(("path", "value"), [(path, one) for path, them in WRONG_RESUME_VALUES.items() for one in them])
def test_wrong_resume_value_is_named(path: str, value: Any, trained: Path) -> None:
    file = trained / "resume.pth"
    change(file, path, value)
    name = path.partition(".")[0]
    with pytest.raises(errors.IncompleteCheckpointError, match=rf"resume\.pth is damaged.*'{name}|'rng_states'"):
        read_checkpoint(trained)
    (problem,) = inspect_checkpoint(trained)["problems"]
    assert verify_checkpoint(trained).problems == [problem]
    assert str(file) in problem
    with pytest.raises(errors.CheckpointError, match=str(file)):
        fit(trained.parent, 5, latest_checkpoint=trained.name)


UNRESUMABLE = {
    "resume.pth": [
        ("rng_states.0.cpu_rng_state", torch.zeros(7, dtype=torch.uint8), "'cpu_rng_state'"),
        ("rng_states.0.cpu_rng_state", torch.ones(5056), "'cpu_rng_state'"),
        ("rng_states.0.np_rng_state", ("MT19937", [1, 2], 3), "'np_rng_state'"),
        ("rng_states.0.random_rng_state", (3, (1, 2), None), "'random_rng_state'"),
        ("rng_states.0.random_rng_state", DELETED, "'random_rng_state': it is missing"),
        ("journals.0.0.rng", torch.zeros(3), "'rng', a dict"),
        ("journals.0.0.rng.np_rng_state", 5, "'np_rng_state'"),
        ("journals.0.0.samplers", DELETED, "'samplers', a list of dicts"),
        ("journals.0.0.color", "red", "must have only 'first_batch', .* 'red'"),
        ("trial_state.batches_trained", 2, "belongs to another checkpoint.* 2 batches; .* was written after 3"),
        ("gradients", [{"no such weight": torch.ones(3)}], "gradients"),
        ("gradients", [], "gradients"),
    ],
    "state_dict.pth": [
        ("optimizers_state_dict", [3], "'optimizers_state_dict' must be a list of dicts; got int"),
        ("models_state_dict", ["weights"], "'models_state_dict' must be a list of dicts; got str"),
        ("models_state_dict.0", {1: torch.ones(2)}, "model 0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "path", "value", "message"), [(name, *row) for name, rows in UNRESUMABLE.items() for row in rows]
)
def test_unresumable_value_is_named(name: str, path: str, value: Any, message: str, trained: Path) -> None:
    change(trained / name, path, value)
    with pytest.raises(errors.CheckpointError, match=message):
        fit(trained.parent, 5, latest_checkpoint=trained.name)


def test_position_beyond_numpys_generator_is_refused(trained: Path) -> None:
    kind, key, _, *rest = read_state(trained / "resume.pth")["rng_states"][0]["np_rng_state"]
    change(trained / "resume.pth", "rng_states.0.np_rng_state", (kind, key, 10**8, *rest))
    # From release 2.5 on numpy says it first.
    said = r"position must be (from 0 to|between 0 and) 624"
    with pytest.raises(errors.InvalidCheckpointException, match=said):
        fit(trained.parent, 5, latest_checkpoint=trained.name)


@pytest.mark.parametrize("part", [{"optimizer_state_dict": {"param_groups": 5}}, {"lr_scheduler": {"_last_lr": 5}}])
def test_wrong_part_of_an_old_state_is_named(part: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, state={"model_state_dict": {}, **part}, by_determined=True)
    (problem,) = inspect_checkpoint(checkpoint)["problems"]
    assert re.search("'(param_groups|_last_lr)' in '.*' must be a list", problem)


def test_wrong_counts_are_named(trained: Path) -> None:
    wrong: list[dict[str, Any]] = [{"batches_trained": value} for value in (3.0, float("nan"), 10**12, True)]
    wrong += [{"batches_trained": "", "epochs_trained": 0}, {"batches_trained": 3, "last_ckpt": []}]
    for counts in [*wrong, {"steps_completed": "3"}]:
        (trained / "trial_state.pkl").write_bytes(pickle.dumps(counts))
        with pytest.raises(errors.IncompleteCheckpointError, match=r"trial_state\.pkl must hold counts"):
            read_checkpoint(trained)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiment_config": "config"}, "'experiment_config' must be an object"),
        ({"trial_cls_spec": 5}, "'trial_cls_spec' must be a string"),
        ({"hparams": 1, "is_trainer": 2}, "'hparams' must be .*'is_trainer' must be"),
        ({"hparams": {"deep": json.loads("[" * 500 + "]" * 500)}}, "nested over 100 deep"),
    ],
)
def test_wrong_load_data_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, by_determined=True)
    file = checkpoint / "load_data.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    for read in (read_checkpoint, lambda path: pytorch.load_trial_from_checkpoint_path(path, trial_class=SmallTrial)):
        with pytest.raises(errors.IncompleteCheckpointError, match=rf"load_data\.json.*{message}") as raised:
            read(checkpoint)
        assert len(str(raised.value)) < 1000


def test_old_settings_must_be_json(trained: Path) -> None:
    file = trained / "resume.pth"
    change(file, "version", DELETED)
    for settings in ("{", "[1]", '{"hparams": [1]}', '{"experiment_config": "x"}', "[" * 100_000):
        change(file, "settings", settings)
        (problem,) = inspect_checkpoint(trained)["problems"]
        assert f"{file} is damaged, or another kind of file: 'settings' must be JSON" in problem


def test_names_that_are_not_strings(tmp_path: Path) -> None:
    state = {**make_state(), "models_state_dict": [{1: torch.ones(2), ("a", 2): torch.zeros(1)}]}
    content = read_checkpoint(write_checkpoint(tmp_path, state=state))
    assert [*to_lightning(content)["state_dict"]] == ["models.0.1", "models.0.('a', 2)"]
