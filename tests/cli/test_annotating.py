"""``det-lightning checkpoint annotate``: what Determined's master knew, added to checkpoints that it wrote."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.format.master_export import MasterExport
from tests.checkpoint.made_checkpoints import assert_equal, make_files, write_checkpoint
from tests.cli.exported import describe_experiment, describe_trial, list_checkpoints, write
from tests.cli.test_cli import error_of, json_of, run

UNKNOWN = "11111111-2222-3333-4444-555555555555"
OTHER = "22222222-2222-3333-4444-555555555555"


class Platform(NamedTuple):
    """A storage with checkpoints of two trials, and what the command line printed about them."""

    storage: Path
    ids: dict[str, str]  # by what they are, such as "7 at 10"
    files: list[Path]


@pytest.fixture(params=["Determined", pytest.param("det_lightning", marks=pytest.mark.slow)])
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Platform:
    storage = tmp_path / "storage"
    accuracies = {(7, 10): 0.5, (7, 20): 0.75, (8, 10): 0.875, (8, 20): "Nan"}
    ids = {}
    for age, (trial, steps) in enumerate(accuracies):
        checkpoint = write_checkpoint(storage, steps, by_determined=request.param == "Determined")
        ids[f"{trial} at {steps}"] = checkpoint.name
        written = time.time() - 1000 + age
        os.utime(checkpoint / "metadata.json", (written, written))
    files = [write(tmp_path / "experiments.json", [describe_experiment()])]
    for trial in (7, 8):
        validated = {ids[f"{trial} at {steps}"]: (steps, accuracies[trial, steps]) for steps in (10, 20)}
        files.append(write(tmp_path / f"trial-{trial}.json", describe_trial(trial, validated)))
    return Platform(storage, ids, files)


def metadata_of(platform: Platform, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads((platform.storage / platform.ids[name] / "metadata.json").read_text())
    return metadata


def contents_of(storage: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in storage.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_adds_what_the_master_knew(platform: Platform) -> None:
    checkpoint = platform.storage / platform.ids["7 at 20"]
    before = load_checkpoint(checkpoint).state
    run("annotate", platform.storage, *platform.files)
    run("verify", platform.storage)
    assert_equal(load_checkpoint(checkpoint).state, before)
    metadata = metadata_of(platform, "7 at 20")
    expected = {
        "trial": "7",
        "experiment": "3",
        "metric": {"name": "accuracy", "value": 0.75, "smaller_is_better": False},
        "hparams": {"lr": 0.1 * 7, "api_key": "k3y-of-nobody"},
        "steps_completed": 20,
    }
    assert {name: metadata[name] for name in expected} == expected
    assert metadata["master"].pop("written_before_s") > 0
    assert metadata["master"] == {
        "experiment": {"name": "digits", "state": "STATE_COMPLETED", "start_time": "2023-05-01T12:00:00.123456789Z"},
        "trial": {"state": "STATE_COMPLETED"},
        "validation_metrics": {"accuracy": 0.75, "loss": 0.5},
    }


def test_best_are_listed_and_kept(platform: Platform) -> None:
    assert json_of("ls", platform.storage, "--best")["checkpoints"] == []
    said = run("ls", platform.storage, "--best").stderr
    assert "No complete checkpoint has a metric; `det-lightning checkpoint annotate`" in said
    run("annotate", platform.storage, *platform.files)
    best = json_of("ls", platform.storage, "--best")["checkpoints"]
    assert [entry["uuid"] for entry in best] == [platform.ids[name] for name in ("8 at 10", "7 at 20", "7 at 10")]
    lines = run("ls", platform.storage, "--best").stdout.splitlines()
    assert lines[0].split() == ["uuid", "experiment", "trial", "steps", "accuracy", "size", "age", "complete"]
    assert lines[2].split()[:5] == [platform.ids["8 at 10"], "3", "8", "10", "0.875"]
    run("prune", platform.storage, "--yes")
    kept = {platform.ids[name] for name in ("7 at 20", "8 at 10", "8 at 20")}
    assert set(CheckpointStorage(platform.storage).list_ids()) == kept


def test_list_of_checkpoints_is_enough(platform: Platform, tmp_path: Path) -> None:
    listed = list_checkpoints(7, {platform.ids["7 at 10"]: (10, 0.5), platform.ids["7 at 20"]: (20, 0.75)})
    found = json_of("annotate", platform.storage, write(tmp_path / "checkpoints.json", listed))
    assert found["experiments_without_metric"] == found["without_metric"] == []
    best = json_of("ls", platform.storage, "--best")["checkpoints"]
    assert [entry["uuid"] for entry in best] == [platform.ids["7 at 20"], platform.ids["7 at 10"]]


def test_only_changes_are_written(platform: Platform) -> None:
    before = contents_of(platform.storage)
    assert "4 annotated, 0 unchanged." in run("annotate", platform.storage, *platform.files, "--dry-run").stdout
    assert contents_of(platform.storage) == before
    run("annotate", platform.storage, *platform.files)
    before = contents_of(platform.storage)
    assert "0 annotated, 4 unchanged." in run("annotate", platform.storage, *platform.files).stdout
    assert "0 annotated, 2 unchanged." in run("annotate", platform.storage, platform.files[1]).stdout
    assert contents_of(platform.storage) == before


def test_newest_checkpoint_stays_the_newest(platform: Platform) -> None:
    later = write_checkpoint(platform.storage, 5)
    for _ in range(2):
        run("annotate", platform.storage, *platform.files)
        assert CheckpointStorage(platform.storage).newest() == str(later)
    later.rename(platform.storage.parent / later.name)
    assert CheckpointStorage(platform.storage).newest() == str(platform.storage / platform.ids["8 at 20"])


def test_annotates_a_remote_storage(tmp_path: Path) -> None:
    storage = CheckpointStorage("memory://annotated")
    checkpoint_id = storage.write(make_files(10), code=tmp_path)
    described = [describe_experiment(), describe_trial(7, {checkpoint_id: (10, 0.5)})]
    file = write(tmp_path / "described.json", described)
    run("annotate", storage, file)
    assert storage.info(checkpoint_id).metadata["metric"]["value"] == 0.5
    assert "0 annotated, 1 unchanged." in run("annotate", storage, file).stdout
    run("verify", storage)
    storage.delete(checkpoint_id)


def test_what_was_matched_and_what_was_not_is_said(platform: Platform, tmp_path: Path) -> None:
    lost = write(tmp_path / "trial-9.json", describe_trial(9, {UNKNOWN: (10, 0.5)}, experiment_id=4))
    lines = run("annotate", platform.storage, *platform.files[:2], lost).stdout.splitlines()
    assert lines[:2] == [f"annotate {platform.ids[name]}" for name in ("7 at 10", "7 at 20")]
    assert lines[2] == "2 annotated, 0 unchanged."
    assert f"1 in the files, but not in the storage: {UNKNOWN}" in lines
    assert any(line.startswith("2 in the storage, but not in the files: ") for line in lines)
    assert "det experiment describe 4 --json" in lines[-1]
    deleted = describe_trial(9, {UNKNOWN: (10, 0.5)})
    deleted["workloads"][-1]["checkpoint"]["state"] = "STATE_DELETED"
    found = json_of("annotate", platform.storage, write(tmp_path / "trial-9.json", deleted))
    assert found["not_in_storage"] == []


@pytest.mark.parametrize(
    ("describe", "says"),
    [
        (lambda one: describe_trial(7, {one: (11, 0.5)}), ["steps_completed", " is 11, but its metadata.json says 10"]),
        (lambda one: describe_trial(7, {one: (10, 0.5)}, experimentId="three"), ["trial.experimentId", "got 'three'"]),
        (lambda _: describe_trial(7, {"../outside": (10, 0.5)}), ["uuid is '../outside', which cannot be the id of a"]),
        (lambda one: [describe_trial(i, {one: (10, 0.5)}) for i in (7, 9)], ["trial_id of", " is 9, but ", " says 7"]),
        (lambda _: {"metrics": [1]}, ["neither an experiment, nor a trial, nor a list of", "{'metrics': [1]}"]),
        (lambda _: [5], ["[0] is neither an experiment", "got 5"]),
    ],
)
def test_refuses_wrong_files(describe: Any, says: list[str], platform: Platform, tmp_path: Path) -> None:
    wrong = write(tmp_path / "wrong.json", describe(platform.ids["7 at 10"]))
    (tmp_path / "outside").mkdir()
    before = contents_of(tmp_path)
    error = error_of("annotate", platform.storage, platform.files[0], platform.files[2], wrong)
    assert all(text in error for text in [str(wrong), *says]), error
    assert contents_of(tmp_path) == before


def test_all_mistakes_of_all_files_are_named(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    wrong = write(tmp_path / "wrong.json", describe_trial(7, {UNKNOWN: (10, 0.5)}, experimentId="three"))
    error = error_of("annotate", platform.storage, tmp_path / "broken.json", wrong)
    assert "broken.json is not JSON" in error
    assert "wrong.json: trial.experimentId" in error
    assert "valid integer" in error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("STATE_COMPLETED"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.data())
def test_changed_output_is_read_or_refused(data: st.DataObject) -> None:
    trial = describe_trial(7, {UNKNOWN: (10, 0.5)})
    printed = json.loads(json.dumps([describe_experiment(), trial, list_checkpoints(8, {OTHER: (5, 1)})]))
    within: Any = printed
    while True:
        key = data.draw(st.sampled_from(list(within) if isinstance(within, dict) else range(len(within))))
        if not isinstance(within[key], dict | list) or not within[key] or data.draw(st.booleans()):
            break
        within = within[key]
    within[key] = data.draw(JSON)
    try:
        export = MasterExport({"some.json": json.dumps(printed).encode()})
    except ValueError as e:
        assert str(e).startswith("some.json")
    else:
        assert all(json.dumps(export.make_entries(one)) for one in export.checkpoints.values())


def test_own_entries_are_not_replaced(platform: Platform, tmp_path: Path) -> None:
    run("annotate", platform.storage, *platform.files)
    other = write(tmp_path / "trial-9.json", describe_trial(9, {platform.ids["7 at 10"]: (10, 0.5)}))
    error = error_of("annotate", platform.storage, other)
    assert "trial-9.json: trial of checkpoint" in error
    assert "is '9', but its metadata.json says '7'" in error
    noted = {"metric": {"name": "accuracy", "value": 0.25, "smaller_is_better": False}}
    own = write_checkpoint(tmp_path / "own", 10, notes=noted)
    trial = write(tmp_path / "trial-7.json", describe_trial(7, {own.name: (10, 0.5)}))
    assert "metric of checkpoint" in error_of("annotate", tmp_path / "own", platform.files[0], trial)


def test_nothing_is_written_through_a_link(platform: Platform, tmp_path: Path) -> None:
    elsewhere = write_checkpoint(tmp_path / "elsewhere", 10, by_determined=True)
    (platform.storage / UNKNOWN).symlink_to(elsewhere)
    linked = platform.storage / platform.ids["7 at 10"] / "metadata.json"
    target = linked.rename(tmp_path / "metadata.json")
    linked.symlink_to(target)
    before = contents_of(tmp_path / "elsewhere"), target.read_bytes(), target.stat().st_mtime_ns
    described = describe_trial(7, {UNKNOWN: (10, 0.5), platform.ids["7 at 10"]: (10, 0.5)})
    found = json_of("annotate", platform.storage, write(tmp_path / "trial.json", described))
    assert found["annotated"] == []
    assert (contents_of(tmp_path / "elsewhere"), target.read_bytes(), target.stat().st_mtime_ns) == before


def test_damaged_metadata_file_is_left_alone(platform: Platform) -> None:
    file = platform.storage / platform.ids["7 at 10"] / "metadata.json"
    file.write_text("{")
    found = json_of("annotate", platform.storage, *platform.files)
    assert found["unreadable"] == [platform.ids["7 at 10"]]
    assert len(found["annotated"]) == 3
    assert file.read_text() == "{"


def test_no_secret_of_a_configuration_is_written(platform: Platform) -> None:
    for checkpoint_id in platform.ids.values():
        (platform.storage / checkpoint_id / "load_data.json").unlink()
    for name in platform.ids:
        if "files" in (metadata := metadata_of(platform, name)):  # as it is without the file
            kept = {key: value for key, value in metadata.items() if key not in ("files", "metadata_crc32c")}
            (platform.storage / platform.ids[name] / "metadata.json").write_text(json.dumps(kept))
    run("annotate", platform.storage, *platform.files)
    assert metadata_of(platform, "7 at 10")["experiment_config"]["name"] == "digits"
    written = b"".join(path.read_bytes() for path in platform.storage.rglob("metadata.json"))
    assert b"s3cr3t" not in written
