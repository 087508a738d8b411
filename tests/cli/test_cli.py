"""``det-lightning``: what it prints, what it changes, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import requests
import torch
from typer.testing import CliRunner, Result

from det_lightning.checkpoint import CheckpointStorage, read_checkpoint, safe_load
from det_lightning.checkpoint.safe_load import inspection
from det_lightning.cli.app import app
from tests.checkpoint.made_checkpoints import assert_equal, make_files, make_state, write_checkpoint
from tests.checkpoint.storage.backends import new_bucket

UNKNOWN = "11111111-2222-3333-4444-555555555555"


def run(*arguments: object, ends_with: int = 0, **settings: Any) -> Result:
    """Run ``det-lightning checkpoint``; a bug in it is raised here."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False, **settings)
    assert result.exit_code == ends_with, result.output
    return result


def json_of(*arguments: object, ends_with: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", ends_with=ends_with).stdout)


def error_of(*arguments: object, ends_with: int = 2) -> str:
    """Return the error, which is one line, and nothing else is printed."""
    result = run(*arguments, ends_with=ends_with)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "storage")


def make_incomplete(checkpoint: Path, age_s: float = 7200.0) -> Path:
    """Leave a checkpoint as a killed writer does."""
    (checkpoint / "metadata.json").unlink()
    for path in (checkpoint, *checkpoint.rglob("*")):
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    return checkpoint


# S3 and memory


@pytest.fixture
def in_bucket(s3_options: dict[str, Any]) -> CheckpointStorage:
    options = {**s3_options, "use_listings_cache": False}
    return CheckpointStorage(f"s3://{new_bucket('s3', options)}/runs", options=options)


def as_flags(storage: CheckpointStorage) -> list[str]:
    return [part for name, value in storage.options.items() for part in ("--option", f"{name}={value}")]


@pytest.fixture
def in_memory() -> Iterator[CheckpointStorage]:
    yield CheckpointStorage("memory://bucket/runs")
    fsspec.filesystem("memory").store.clear()


def write_remote(storage: CheckpointStorage, tmp_path: Path, **changes: Any) -> str:
    """Write a checkpoint, with code, and return its id."""
    code = tmp_path / "code"
    code.mkdir(exist_ok=True)
    (code / "model_def.py").write_text("# code\n")
    return storage.write(make_files(**changes), code=code)


# Starting


def test_program_prints_version() -> None:
    program = Path(sys.executable).with_name("det-lightning")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("det-lightning 0.")
    module = subprocess.run([sys.executable, "-m", "det_lightning.cli", "--version"], capture_output=True, text=True)
    assert module.stdout == done.stdout


# ls


def test_ls_lists_newest_first(tmp_path: Path) -> None:
    old = write_checkpoint(tmp_path, 5, notes={"time": time.time() - 90})
    new = write_checkpoint(tmp_path, 9, notes={"time": time.time() - 3})
    torn = make_incomplete(write_checkpoint(tmp_path, 11), age_s=3 * 86400)
    (tmp_path / "no checkpoint").mkdir()
    lines = run("ls", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["uuid", "steps", "metric", "size", "age", "complete"]
    assert [line.split()[0] for line in lines[2:]] == [new.name, old.name, torn.name]
    assert [line.split()[-1] for line in lines[2:]] == ["yes", "yes", "NO"]
    assert " 1 min " in lines[3]
    assert " 3 d " in lines[4]


def test_ls_ignores_times_in_the_future(tmp_path: Path) -> None:
    claiming = write_checkpoint(tmp_path, 5, notes={"time": time.time() + 10 * 86400})
    newest = write_checkpoint(tmp_path, 9, notes={"time": time.time() + 3600})
    listed = json_of("ls", tmp_path)["checkpoints"]
    assert [entry["uuid"] for entry in listed] == [newest.name, claiming.name]
    assert listed[1]["written_s"] < time.time() + 60


def test_ls_with_json_lists_every_field(tmp_path: Path) -> None:
    noted = {"time": 1.5, "trial": "t1", "experiment": "e", "metric": {"name": "loss", "value": float("nan")}}
    checkpoint = write_checkpoint(tmp_path, notes=noted)
    assert json_of("ls", tmp_path) == {
        "storage": str(tmp_path),
        "checkpoints": [
            {
                "uuid": checkpoint.name,
                "complete": True,
                "steps_completed": 7,
                "metric": {"name": "loss", "value": "NaN"},
                "size_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
                "written_s": 1.5,
                "written": "1970-01-01T00:00:01.500000+00:00",
                "trial": "t1",
                "experiment": "e",
            }
        ],
    }


def test_ls_names_each_metric_if_there_are_several(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, notes={"metric": {"name": "accuracy", "value": 0.875}})
    assert [line.split()[2] for line in run("ls", tmp_path).stdout.splitlines()[::2]] == ["accuracy", "0.875"]
    write_checkpoint(tmp_path, notes={"metric": {"name": "loss", "value": 9.0, "smaller_is_better": False}})
    output = run("ls", tmp_path).stdout
    assert "accuracy=0.875" in output
    assert "loss=9" in output


def test_checkpoints_of_determined_are_complete(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, by_determined=True)
    assert "as Determined does, without a position in the data" in run("show", checkpoint).stdout
    (entry,) = json_of("ls", tmp_path)["checkpoints"]
    assert (entry["complete"], entry["steps_completed"], entry["metric"]) == (True, 7, None)
    for name in ("metadata.json", "load_data.json"):  # which the oldest releases did not write
        (checkpoint / name).unlink()
    assert json_of("ls", tmp_path)["checkpoints"][0]["complete"]


# show


def test_show_lists_the_content(checkpoint: Path) -> None:
    output = run("show", checkpoint).stdout
    for line in (
        "trial:       model_def:DigitsTrial",
        "hparams:     lr=0.1, kind='adam'",
        "experiment:  digits",
        "batches_trained=7, epochs_trained=2",
        "complete:    yes",
        "code/ (files: 2)",
        "Optimizer 0: 1 parameter group(s), lr 0.01",
        "Scheduler 0: last epoch 1, lr 0.01",
        "Callbacks with a state: counter",
        "Random states: torch, numpy, random",
        "Resumes: at the very next batch",
    ):
        assert line in output
    assert "0: 1.num_batches_tracked  int64    scalar" in run("show", checkpoint, "--tensors").stdout


def test_show_as_json_names_tensors_if_asked(checkpoint: Path) -> None:
    reported = json_of("show", checkpoint)
    assert [model["values"] for model in reported["models"]] == [28, 4]
    assert reported["models"][0]["dtypes"] == {"float32": 27, "int64": 1}
    assert reported["models"][0]["tensors"] == 7
    assert (reported["exact_resume"], reported["lightning"], reported["problems"]) == (True, False, [])
    assert "code/model_def.py" in reported["files"]
    (head,) = json_of("show", checkpoint, "--tensors")["models"][1:]
    assert head["tensors"][0] == {"name": "weight", "shape": [1, 3], "dtype": "float32"}


class RunsCode:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_show_names_unsafe_references(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, by_determined=True)
    torch.save({**make_state(), "x": RunsCode()}, checkpoint / "state_dict.pth")
    output = run("show", checkpoint, ends_with=1).stdout
    (problem,) = (line for line in output.splitlines() if line.startswith("PROBLEM: "))
    assert f"{checkpoint / 'state_dict.pth'} refers to" in problem
    assert "posix.system" in problem
    assert "--trusted" in problem
    assert "model_def:DigitsTrial" in output
    assert not Path("ran").exists()
    run("show", checkpoint, "--trusted")
    assert Path("ran").exists()


def test_show_reports_each_damaged_file(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, by_determined=True)
    for name in ("state_dict.pth", "load_data.json", "trial_state.pkl"):
        (checkpoint / name).write_bytes(b"{")
    problems = json_of("show", checkpoint, ends_with=1)["problems"]
    assert len(problems) == 3
    assert all(str(checkpoint) in problem for problem in problems)


# verify


def test_verify_of_a_storage_verifies_all_in_it(tmp_path: Path) -> None:
    fine, old = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2, by_determined=True)
    lines = run("verify", tmp_path).stdout.splitlines()
    reported = {line.split()[0]: line.split(maxsplit=3)[1:] for line in lines[2:]}
    assert reported[fine.name] == ["fine", "7", "6".ljust(len("none, as Determined writes it"))]
    assert reported[old.name] == ["fine", "6", "none, as Determined writes it"]
    assert len(json_of("verify", fine, tmp_path)["checkpoints"]) == 2


@pytest.mark.parametrize("when", ["before", "during"])
def test_verify_leaves_out_what_is_deleted(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sorted([write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)])

    def verify(directory: Path, **options: Any) -> inspection.Verdict:
        """Verify while a run deletes the second checkpoint."""
        if directory == (first if when == "before" else second):
            CheckpointStorage(tmp_path).delete(second.name)
        return inspection.verify_checkpoint(directory, **options)

    monkeypatch.setattr(safe_load, "verify_checkpoint", verify)
    (one,) = json_of("verify", tmp_path)["checkpoints"]
    assert (one["path"], one["fine"]) == (str(first), True)


def test_verify_leaves_out_what_is_being_written(tmp_path: Path) -> None:
    fine = write_checkpoint(tmp_path, 1)
    staging = CheckpointStorage(tmp_path).stage(UNKNOWN)
    (staging.directory / "load_data.json").touch()
    lines = run("verify", tmp_path).stdout.splitlines()
    assert lines[2].split()[:2] == [fine.name, "fine"]
    assert lines[3:] == [f"Left out, as it is being written or deleted: {tmp_path / UNKNOWN}"]
    staging.abandon()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda c: (c / "state_dict.pth").write_bytes((c / "state_dict.pth").read_bytes()[:-1] + b"x"), "the checksum"),
        (lambda c: (c / "code" / "model_def.py").unlink(), "code/model_def.py is missing"),
        (lambda c: (c / "resume.pth").write_bytes(b""), "resume.pth has 0 bytes in place of"),
        (lambda c: (c / "metadata.json").write_text("{"), "metadata.json cannot be read"),
        (lambda c: (c / "load_data.json").write_text("{}"), "load_data.json lacks hparams"),
    ],
)
def test_verify_finds_what_is_wrong(damage: Any, problem: str, checkpoint: Path) -> None:
    damage(checkpoint)
    fine = write_checkpoint(checkpoint.parent)
    found = json_of("verify", checkpoint.parent, ends_with=1)["checkpoints"]
    assert {Path(one["path"]).name: one["fine"] for one in found} == {checkpoint.name: False, fine.name: True}
    assert any(problem in text for one in found for text in one["problems"])


# export and import


@pytest.mark.parametrize("kind", ["weights", "safetensors", "lightning"])
def test_export_writes_a_file_and_says_where(kind: str, checkpoint: Path) -> None:
    assert run("export", checkpoint, "--to", kind, "-o", "out.file").stdout == "out.file\n"
    before = Path("out.file").read_bytes()
    assert "exists; --force replaces it" in error_of("export", checkpoint, "--to", kind, "-o", "out.file")
    assert Path("out.file").read_bytes() == before
    reported = json_of("export", checkpoint, "--to", kind, "-o", "out.file", "--force")
    assert reported == {"path": "out.file", "bytes": Path("out.file").stat().st_size, "left_out": []}
    assert [path.name for path in Path().glob("*out*")] == ["out.file"]


def test_without_safetensors_the_extra_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    said = error_of("export", checkpoint, "--to", "safetensors", "-o", "out")
    assert "needs safetensors: pip install -e '.[safetensors]'" in said
    assert not Path("out").exists()


def test_import_reverses_export(checkpoint: Path, tmp_path: Path) -> None:
    run("export", checkpoint, "--to", "lightning", "-o", "file.ckpt")
    imported = run("import", "file.ckpt", tmp_path / "new" / "storage").stdout.strip()
    directory = tmp_path / "new" / "storage" / imported
    assert_equal(read_checkpoint(directory).state, read_checkpoint(checkpoint).state)
    assert list((directory / "code").iterdir()) == []
    assert json.loads((directory / "metadata.json").read_text())["imported_from"] == "file.ckpt"
    run("verify", directory)
    reported = json_of("import", "file.ckpt", tmp_path / "new" / "storage")
    assert reported["path"] == str(tmp_path / "new" / "storage" / reported["uuid"])


def test_import_refuses_what_is_no_trial_of_ours(tmp_path: Path) -> None:
    for content in (b"", b"hello", pickle.dumps([1], protocol=2)):
        Path("file.ckpt").write_bytes(content)
        assert "file.ckpt" in error_of("import", "file.ckpt", tmp_path, ends_with=1)
    torch.save({"state_dict": {"weight": torch.ones(2)}, "global_step": 3, "epoch": 1}, "other.ckpt")
    assert "is not a TrialModule" in error_of("import", "other.ckpt", tmp_path, ends_with=1)
    torch.save({"state_dict": {"w": torch.ones(1)}, "x": RunsCode()}, "unsafe.ckpt")
    message = error_of("import", "unsafe.ckpt", tmp_path, ends_with=1)
    assert "posix.system" in message
    assert "--trusted" in message
    assert not Path("ran").exists()
    error_of("import", "unsafe.ckpt", tmp_path, "--trusted", ends_with=1)
    assert Path("ran").exists()
    assert list(tmp_path.iterdir()) == []


# prune


@pytest.fixture
def indexed(tmp_path: Path) -> dict[str, Path]:
    """Checkpoints of two trials of an experiment; a later one has a higher metric, which is better."""
    found = {}
    for trial in ("a", "b"):
        for step in (1, 2, 3):
            value = {"a": 0.1, "b": 0.5}[trial] + (0.3 if step == 2 else 0.01 * step)
            metric = {"name": "accuracy", "value": value, "smaller_is_better": False}
            notes = {"experiment": "digits", "trial": trial, "metric": metric}
            found[f"{trial}{step}"] = write_checkpoint(tmp_path, step, notes=notes)
    return found


def left_in(found: dict[str, Path]) -> list[str]:
    return [name for name, path in found.items() if path.exists()]


@pytest.mark.parametrize(
    ("flags", "left"),
    [([], ["a2", "a3", "b2", "b3"]), (["--trial-best", "0", "--trial-latest", "0", "--experiment-best", "1"], ["b2"])],
)
def test_prune_keeps_what_the_rule_keeps(flags: list[str], left: list[str], indexed: dict[str, Path]) -> None:
    storage = next(iter(indexed.values())).parent
    alone = write_checkpoint(storage)
    planned = json_of("prune", storage, *flags, "--dry-run")
    assert left_in(indexed) == list(indexed)
    reported = json_of("prune", storage, *flags, "--yes")
    assert left_in(indexed) == left
    assert reported["deleted"] == planned["to_delete"]
    assert reported["of_unknown_trials"] == [alone.name]
    assert "Nothing to delete." in run("prune", storage, *flags, "--yes").stdout
    assert {entry["trial"] for entry in json_of("ls", storage)["checkpoints"]} >= {"a", "b"} & {n[0] for n in left}


def test_prune_says_what_it_does(indexed: dict[str, Path]) -> None:
    storage = indexed["a1"].parent
    write_checkpoint(storage)
    result = run("prune", storage, ends_with=2)
    assert "needs confirmation, and there is no terminal. Use --yes" in result.stderr
    assert left_in(indexed) == list(indexed)
    output = run("prune", storage, "--yes").stdout
    assert f"delete {indexed['a1'].name}  trial a, 1 steps, metric 0.11" in output
    assert "4 kept by the rule." in output
    assert "1 written by another program, of an unknown trial: left alone." in output
    assert output.endswith("2 deleted.\n")


def test_at_a_terminal_prune_asks(
    indexed: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = indexed["a1"].parent
    monkeypatch.setattr(sys, "stdin", None)  # closed, as by <&-
    assert app(["checkpoint", "prune", str(storage)], standalone_mode=False) == 2
    for answer, left in (("n\n", 6), ("y\n", 4)):
        ours, theirs = pty.openpty()
        os.write(ours, answer.encode())
        with os.fdopen(ours, "wb"), os.fdopen(theirs) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert not app(["checkpoint", "prune", str(storage)], standalone_mode=False)
        assert f"Delete 2 checkpoints in {storage}? [y/N]" in capsys.readouterr().err
        assert len(left_in(indexed)) == left


def test_prune_refuses_what_contradicts(indexed: dict[str, Path]) -> None:
    storage = indexed["a1"].parent
    for flag in ("--experiment-best", "--trial-best", "--trial-latest"):
        said = error_of("prune", storage, flag, "-1", "--yes")
        assert f"save_{flag[2:].replace('-', '_')}=-1" in said
    loss = {"name": "loss", "value": 0.5, "smaller_is_better": True}
    write_checkpoint(storage, notes={"experiment": "digits", "trial": "c", "metric": loss})
    assert "by different metrics" in error_of("prune", storage, "--yes")
    assert left_in(indexed) == list(indexed)


# Remote storages


@pytest.mark.slow
def test_every_command_works_on_s3(in_bucket: CheckpointStorage, tmp_path: Path) -> None:
    notes = {"experiment": "e", "trial": "t"}
    deleted, checkpoint_id = (write_remote(in_bucket, tmp_path, steps=step, notes=notes) for step in (1, 2))
    url, flags = f"{in_bucket}/{checkpoint_id}", as_flags(in_bucket)
    assert json_of("prune", in_bucket, "--yes", *flags)["deleted"] == [deleted]
    assert checkpoint_id in run("ls", in_bucket, *flags).stdout
    assert "model_def:DigitsTrial" in run("show", url, *flags).stdout
    run("verify", in_bucket, *flags)
    run("export", url, "--to", "lightning", "-o", "file.ckpt", *flags)
    imported = run("import", "file.ckpt", in_bucket, *flags).stdout.strip()
    assert sorted(in_bucket.list_ids()) == sorted([checkpoint_id, imported])
    assert f"Similar ids: {checkpoint_id}" in error_of("show", url[:-2], *flags)


def test_errors_of_a_remote_checkpoint_name_its_url(in_memory: CheckpointStorage, tmp_path: Path) -> None:
    checkpoint_id = write_remote(in_memory, tmp_path)
    file = in_memory.root / checkpoint_id / "state_dict.pth"
    file.write(file.read()[:-100])
    url = f"memory://bucket/runs/{checkpoint_id}"
    assert str(in_memory.root / checkpoint_id) in error_of("export", url, "--to", "weights", "-o", "x", ends_with=1)
    for command in ("show", "verify"):
        output = run(command, url, ends_with=1).stdout
        assert f"{in_memory.root / checkpoint_id}/state_dict.pth" in output
        assert str(Path(os.environ.get("TMPDIR", "/tmp")) / "det_lightning-") not in output


def test_insufficient_credentials_are_an_error(in_bucket: CheckpointStorage) -> None:
    reset_auth = f"{in_bucket.options['endpoint_url']}/moto-api/reset-auth"
    requests.post(reset_auth, data=b"0", timeout=10)
    try:
        for command in (["ls", in_bucket], ["show", f"{in_bucket}/{UNKNOWN}"], ["verify", in_bucket]):
            assert "PermissionError" in error_of(*command, *as_flags(in_bucket))
    finally:
        requests.post(reset_auth, data=b"inf", timeout=10)


# Wrong use


COMMANDS = {
    "ls": ["ls", "{}"],
    "show": ["show", "{}"],
    "verify": ["verify", "{}"],
    "export": ["export", "{}", "--to", "weights", "-o", "out"],
    "import": ["import", "{}", "storage"],
    "prune": ["prune", "{}", "--yes"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "foo://bucket",
            "'foo://bucket' cannot be opened: Protocol not known: foo.*A storage is a directory, or a URL",
        ),
        ("az://container/prefix", r"pip install -e '\.\[azure\]'"),
        ("memory://nowhere/at/all", "There is no "),
    ],
)
def test_unreachable_storage_is_an_error(command: list[str], url: str, message: str) -> None:
    if url.startswith("az") and importlib.util.find_spec("adlfs") is not None:
        pytest.skip("adlfs is installed")
    for flags in ([], ["--json"]):
        assert re.search(message, error_of(*(part.format(url) for part in command), *flags))
    assert not Path("out").exists()
    assert not Path("storage").exists()


def test_storage_and_checkpoint_are_told_apart(checkpoint: Path) -> None:
    storage = checkpoint.parent
    said = f"is a directory of 1 checkpoints, not a checkpoint: name a checkpoint, such as {checkpoint}"
    assert said in error_of("show", storage)
    for command in ("ls", "prune"):
        assert "is a checkpoint; name the storage that holds the checkpoint" in error_of(command, checkpoint)
    (storage / "empty").mkdir()
    for command in ("show", "verify"):
        assert "is not a checkpoint: state_dict.pth" in error_of(command, storage / "empty")
    for command in ("show", "export", "verify"):
        arguments = [part.format(str(checkpoint)[:-2]) for part in COMMANDS[command]]
        assert f"Similar ids: {checkpoint.name}" in error_of(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["s3://u:p@ss word@h", "--trial-bests"],
        ["ls", "storage", "s3://u:p@ss word@h"],
        ["ls", "storage", "secret=p@ss word"],
        ["export", "checkpoint", "--to", "s3://u:p@ss word@h", "-o", "file"],
    ],
)
def test_errors_in_arguments_show_no_password(arguments: list[str]) -> None:
    shown = run(*arguments, ends_with=2).stderr
    assert "********" in shown
    assert "p@ss" not in shown
    assert "Usage: " in shown


@pytest.mark.parametrize("option", ["x", "=1", "a-b=1", "list=[1", "object={"])
def test_malformed_option_is_refused(option: str, checkpoint: Path) -> None:
    for command in COMMANDS.values():
        said = error_of(*(part.format(checkpoint) for part in command), "--option", option)
        assert "--option" in said
        assert "***" not in said


def test_unknown_option_is_refused() -> None:
    assert "unknown_one" in error_of("ls", "s3://bucket", "--option", "unknown_one=1")


def test_export_needs_a_file_and_a_format(checkpoint: Path) -> None:
    for target in ("", ".", "missing/file", "s3://bucket/file"):
        assert "--output" in error_of("export", checkpoint, "--to", "weights", "-o", target)
    result = run("export", checkpoint, "--to", "onnx", "-o", "out", ends_with=2, env={"COLUMNS": "200"})
    assert "'weights', 'safetensors', 'lightning'" in result.stderr


def test_import_needs_a_file_and_a_directory(checkpoint: Path, tmp_path: Path) -> None:
    assert "is a directory; import takes a .ckpt file" in error_of("import", checkpoint, tmp_path)
    run("export", checkpoint, "--to", "lightning", "-o", "file.ckpt")
    assert "No checkpoint can be written in" in error_of("import", "file.ckpt", "file.ckpt/storage")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_unreadable_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "state_dict.pth").chmod(0)
    assert "state_dict.pth" in error_of("export", checkpoint, "--to", "weights", "-o", "out", ends_with=1)
    checkpoint.parent.chmod(0)
    assert "Permission denied" in error_of("ls", checkpoint.parent)
    checkpoint.parent.chmod(0o700)


# Odd metadata

ODD_METADATA: dict[str, Any] = {
    "a metric that is a list": {"metric": [1, 2]},
    "a metric whose name is a list": {"metric": {"name": ["loss"], "value": 1.0}},
    "a metric of 400 digits": {"metric": {"name": "loss", "value": 10**400}},
    "a metric that is NaN": {"metric": {"name": "loss", "value": float("nan")}},
    "a direction that is none": {"metric": {"name": "loss", "value": 1.0, "smaller_is_better": "no"}},
    "steps that are a text": {"steps_completed": "seven"},
    "steps of 400 digits": {"steps_completed": 10**400},
    "negative steps": {"steps_completed": -1},
    "a time of 400 digits": {"time": 10**400},
    "a time far away": {"time": 1e300},
    "a trial that is a number": {"trial": 3},
    "names that are no file's": {"trial": "../x", "experiment": "a/b"},
    "a framework that is a dict": {"framework": {"torch": 2}},
    "deep values": {"more": json.loads("[" * 400 + "]" * 400)},
}


@pytest.mark.slow
@pytest.mark.parametrize("by_determined", [True, False])
def test_odd_metadata_ends_no_command(by_determined: bool, tmp_path: Path) -> None:
    odd: dict[str, Path] = {}
    for name, entries in ODD_METADATA.items():
        odd[name] = checkpoint = write_checkpoint(tmp_path, by_determined=by_determined)
        known = {"trial": "t", "experiment": name, "time": 5.0, "metric": {"name": "loss", "value": 2.0}}
        content = {**json.loads((checkpoint / "metadata.json").read_text()), **known, **entries}
        content.pop("metadata_crc32c", None)
        (checkpoint / "metadata.json").write_text(json.dumps(content))
    for flags in ([], ["--json"]):
        listed = run("ls", tmp_path, *flags).stdout
        assert [path for path in odd.values() if path.name not in listed] == []
        run("prune", tmp_path, "--dry-run", *flags)
    verified = json_of("verify", tmp_path, ends_with=1)["checkpoints"]
    assert [one["path"] for one in verified if not one["fine"]] == [str(odd["deep values"])]
    for name, checkpoint in odd.items():
        damaged = int(name == "deep values")
        for flags in ([], ["--json"]):
            run("show", checkpoint, *flags, ends_with=damaged)
        run("export", checkpoint, "--to", "weights", "-o", name, ends_with=damaged)
    run("prune", tmp_path, "--trial-best", "0", "--trial-latest", "0", "--yes")


@pytest.mark.parametrize("content", ["[1, 2]", "null", "{", "[" * 100_000])
def test_metadata_without_object_ends_no_command(content: str, checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text(content)
    assert checkpoint.name in run("ls", checkpoint.parent).stdout
    assert "metadata.json" in run("show", checkpoint, ends_with=1).stdout
    assert "metadata.json" in run("verify", checkpoint.parent, ends_with=1).stdout
    run("prune", checkpoint.parent, "--yes")
    assert "metadata.json" in error_of("export", checkpoint, "--to", "weights", "-o", "file", ends_with=1)
    assert checkpoint.exists()


@pytest.mark.parametrize("value", [10**400, "fast", [0.1], float("nan"), None])
def test_odd_learning_rates_end_no_command(value: Any, tmp_path: Path) -> None:
    state = make_state()
    state["optimizers_state_dict"][0]["param_groups"][0]["lr"] = value
    state["lr_schedulers_state_dict"] = [{"last_epoch": value, "_last_lr": [value]}]
    checkpoint = write_checkpoint(tmp_path, state=state)
    assert "Optimizer 0: 1 parameter group(s)" in run("show", checkpoint).stdout
    json_of("show", checkpoint)
