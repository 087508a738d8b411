"""What is copied into ``code/``, whatever lies in the working directory and whatever happens to it meanwhile."""

from __future__ import annotations

import concurrent.futures
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
from det_lightning.checkpoint.format.code_copy import CodeCopier

MODULE = "a_module_of_this_test"


def touch(*paths: str, content: str = "content") -> None:
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def files_below(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    """Return a function that copies the working directory and returns the files of the copy."""

    def copy(**arguments: Any) -> list[str]:
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        CodeCopier(**arguments).copy(target)
        return files_below(target)

    return copy


@pytest.fixture
def load_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that imports ``MODULE`` from a directory."""

    def load(directory: str) -> None:
        monkeypatch.syspath_prepend(str(Path(directory).absolute()))
        importlib.import_module(MODULE)

    yield load
    sys.modules.pop(MODULE, None)


def write(root: Path | str, code: CodeCopier | Path | None = None) -> Path:
    """Write a checkpoint with a copy of the code, by default of the working directory; return the copy."""
    return Path(root) / CheckpointStorage(root).write(CheckpointContent({}, TrialState()), code=code) / "code"


def warnings_in(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


# What is not a file


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


# A text is the target of a link.
@pytest.mark.parametrize("kind", [os.mkfifo, make_socket, ".", "odd", "nowhere", "/etc", "/etc/hosts", "/dev/zero"])
def test_special_files_are_left_out(kind: Any, copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    touch("kept.py", "package/kept.py")
    for path in (Path("odd"), Path("package/odd")):
        path.symlink_to(kind) if isinstance(kind, str) else kind(path)
    assert copied() == ["kept.py", "package/kept.py"]
    assert "odd (it is " in warnings_in(caplog)
    assert "package/odd (it is " in warnings_in(caplog)


def test_ignored_link_needs_no_warning(copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    touch("kept.py")
    Path("data").symlink_to("/etc")
    Path(".detignore").write_text("data/\n")
    assert copied() == ["kept.py"]
    assert warnings_in(caplog) == ""


@pytest.mark.parametrize("name", ["back\\slash", "new\nline", b"not utf-8 \xff"])
def test_odd_name_is_left_out(name: str | bytes, copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    touch("kept.py", os.fsdecode(name))
    assert copied() == ["kept.py"]
    assert "not every storage can hold its name" in warnings_in(caplog)
    assert warnings_in(caplog).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
@pytest.mark.parametrize("name", ["package/secret.txt", "package"])
def test_unreadable_files_are_left_out(name: str, copied: Any, caplog: pytest.LogCaptureFixture) -> None:
    touch("kept.py", "package/secret.txt")
    Path(name).chmod(0)
    try:
        assert copied() == ["kept.py"]
    finally:
        Path(name).chmod(0o700)
    assert "Permission denied" in warnings_in(caplog)


@pytest.mark.slow
def test_vanishing_files_do_not_stop_the_copy(copied: Any) -> None:
    touch("kept.py")
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            for number in range(20):
                touch(f"folder {number}/passing.py", f"passing {number}.py")
            for number in range(20):
                Path(f"folder {number}/passing.py").unlink()
                Path(f"folder {number}").rmdir()
                Path(f"passing {number}.py").unlink()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        passing = pool.submit(come_and_go)
        try:
            for _ in range(20):
                assert "kept.py" in copied()
        finally:
            over.set()
        passing.result()


def test_too_deep_directory_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch("kept.py")
    here = os.open(".", os.O_RDONLY)
    try:
        for _ in range(25):  # longer than a path may be, seen from the top
            Path("d" * 200).mkdir()
            os.chdir("d" * 200)
        touch("deep.py")
    finally:
        os.chdir(here)
        os.close(here)
    CodeCopier().copy(tmp_path / "code")
    assert (tmp_path / "code" / "kept.py").exists()
    assert "File name too long" in warnings_in(caplog)


@pytest.mark.parametrize("code_dir", [None, Path("project")])
def test_removed_directory_is_a_warning(
    code_dir: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if code_dir is None:
        Path("gone").mkdir()
        monkeypatch.chdir("gone")
        Path("../gone").rmdir()
    assert files_below(write(tmp_path, code_dir)) == []
    assert "removed" in caplog.text if code_dir is None else "project" in caplog.text


# .detignore


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_detignore_leaves_out_what_it_names(encoding: str, copied: Any) -> None:
    touch("kept.py", "größe/large")
    Path(".detignore").write_text("größe/\r\n", encoding)
    assert copied() == ["kept.py"]


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "not UTF-8": lambda path: path.write_text("größe/", "latin-1"),
    "no pattern": lambda path: path.write_text("!"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_detignore_leaves_out_all_but_python_files(
    kind: str, copied: Any, caplog: pytest.LogCaptureFixture
) -> None:
    touch("kept.py", "perhaps private.csv")
    UNREADABLE[kind](Path(".detignore"))
    assert copied() == ["kept.py"]
    assert ".detignore" in warnings_in(caplog)


# Secrets


SECRETS = [
    *(".env", "deep/.env.production", ".netrc", ".aws/credentials", "credentials.json", "kaggle.json", ".pypirc"),
    *("keys/id_ed25519", "id_work", "server.pem", "tls.key", ".git-credentials"),
]


def test_secrets_are_left_out_by_default(copied: Any) -> None:
    kept = ["credentials.py", "id_rsa.pub", "id_to_label.json", "id_words/kept.txt", "kept.py", "settings.env"]
    touch(*kept, *SECRETS)
    assert copied() == kept
    assert copied(with_secrets=True) == sorted([*kept, *SECRETS])
    Path(".detignore").write_text("".join(f"!{Path(name).name}\n" for name in SECRETS))
    assert copied() == sorted([*kept, *SECRETS])


# .gitignore


def test_gitignore_applies(copied: Any) -> None:
    touch("kept.py", "data/large", "package/data/small")
    Path(".gitignore").write_text("/data/\n")
    assert copied() == [".gitignore", "kept.py", "package/data/small"]
    Path(".detignore").write_text("!/data/\n")
    assert copied() == [".gitignore", "data/large", "kept.py", "package/data/small"]


def test_gitignore_means_what_git_reads(copied: Any) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    touch("a.py", "a.txt", "src/b.py", "src/b.txt", "src/log/c.log", "out/d.py", "x y.txt", "x y")
    touch(".gitignore", content="*.txt\n!x*.txt\n/out\nlog/*\n\n# no pattern\nx\\ y\n")
    listed = subprocess.check_output(["git", "ls-files", "-z", "--others", "--exclude-standard"], text=True)
    assert copied() == sorted(filter(None, listed.split("\0")))


# Modules


@pytest.mark.parametrize("where", ["generated", ".idea/scripts", "large"])
def test_imported_module_is_copied(where: str, copied: Any, load_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(f"{where}/{MODULE}.py", f"{where}/other.csv", content="X = 1\n")
    touch("kept.py")
    touch(".gitignore", content="generated/\n")
    assert f"{where}/{MODULE}.py" not in copied() or where == "large"
    load_module(where)
    if where == "large":
        monkeypatch.setattr("det_lightning.checkpoint.format.code_copy.MOST_BYTES", 4)
    assert f"{where}/{MODULE}.py" in copied()
    assert f"{where}/other.csv" not in copied()


def test_linked_module_is_copied(copied: Any, load_module: Any, tmp_path: Path) -> None:
    touch(str(tmp_path / "shared" / f"{MODULE}.py"), str(tmp_path / "shared" / "private.txt"), content="X = 1\n")
    Path("shared").symlink_to(tmp_path / "shared")
    load_module("shared")
    assert copied() == [f"shared/{MODULE}.py"]


@pytest.mark.parametrize("where", ["private", "venv/lib"])
def test_unwanted_module_is_left_out(where: str, copied: Any, load_module: Any) -> None:
    touch(f"{where}/{MODULE}.py", f"lib/site-packages/{MODULE}.py", "venv/pyvenv.cfg", content="X = 1\n")
    touch(".detignore", content="private/\n")
    touch(".gitignore", content="lib/\n")
    load_module(where)
    assert copied() == [".gitignore"]


RESULTS = [
    *("__pycache__/a.pyc", "package/__pycache__/x", ".git/HEAD", ".idea/x", ".vscode/x", ".mypy_cache/x", "left.pyc"),
    *("terraform.tfstate", "venv/pyvenv.cfg", "venv/lib/big.py", "own_cache/CACHEDIR.TAG", "own_cache/x"),
    *(f"experiments/first-1/{name}" for name in ("events.jsonl", "config.json", "code/model.py")),
    *(f"older/some-id/{name}" for name in ("metadata.json", "state_dict.pth", "code/model.py")),
    *(f"lightning_logs/version_0/{name}" for name in ("hparams.yaml", "events.out.tfevents.1", "checkpoints/x.ckpt")),
]


def test_results_and_caches_are_left_out(copied: Any) -> None:
    kept = ["config.json", "deep/core/kept.py", "experiments/readme.py", "kept.py", "package/.hidden"]
    kept += ["runs/events.out.tfevents.1", "wandb/config.yaml"]  # as in Determined, unless ignored
    touch(*kept, *RESULTS)
    assert copied() == kept


def test_large_directory_copies_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch("kept.py", "package/kept.py", "package/left.txt")
    touch("data/large.bin", "weights.bin")
    os.truncate("data/large.bin", 80 * 1024**2)
    os.truncate("weights.bin", 20 * 1024**2)
    code = CodeCopier()
    for _ in range(2):
        assert files_below(write(tmp_path, code)) == ["kept.py", "package/kept.py"]
    (message,) = warnings_in(caplog).splitlines()
    parts = [
        "only Python files and imported modules",
        "data (80.0 MiB), weights.bin (20.0 MiB)",
        "95 MiB",
        ".detignore",
    ]
    assert [part for part in parts if part not in message] == []
    Path(".detignore").write_text("data/\n")
    assert "weights.bin" in files_below(write(tmp_path, code))


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_permissions_follow_the_umask(umask: int, tmp_path: Path) -> None:
    for name, mode in {"package/module.py": 0o666, "run.sh": 0o777, "read_only": 0o444, "private": 0o600}.items():
        touch(name)
        Path(name).chmod(mode)
    before = os.umask(umask)
    try:
        CodeCopier().copy(tmp_path / "code")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "code", *(tmp_path / "code").rglob("*"))}
    assert {modes.pop(name) for name in ("code", "package", "run.sh")} == {0o777 & ~umask}
    assert modes == {"module.py": 0o666 & ~umask, "read_only": (0o444 & ~umask) | 0o600, "private": 0o600}


# Checkpoints in the directory of the code


@pytest.mark.parametrize("storage", ["output/checkpoints", "output/../output/checkpoints", "a link", "file URL"])
def test_storage_in_the_code_is_not_copied(storage: str) -> None:
    touch("model_def.py", "output/checkpoints/notes.txt")
    Path("a link").symlink_to("output/checkpoints")
    location = f"file://{Path.cwd()}/output/checkpoints" if storage == "file URL" else storage
    for _ in range(2):
        checkpoint = CheckpointStorage(location).write(CheckpointContent({}, TrialState()))
    assert files_below(Path("output/checkpoints", checkpoint, "code")) == ["model_def.py"]


@pytest.mark.parametrize("storage", [".", "../here"])
def test_checkpoints_in_working_directory_are_not_copied(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    touch("model_def.py", "package/metadata.json/x", ".det_lightning/index/x/y.json")
    for _ in range(3):
        assert files_below(write(storage)) == ["model_def.py", "package/metadata.json/x"]


def test_remote_copy_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    touch("model_def.py", "tmp/notes.txt")
    monkeypatch.setattr("tempfile.tempdir", str(Path("tmp").resolve()))
    storage = CheckpointStorage("memory://copies")
    location = storage.root / storage.write(CheckpointContent({}, TrialState()))
    copied = [name for name in location.find_files() if name.startswith("code/")]
    location.remove()
    assert sorted(copied) == ["code/model_def.py", "code/tmp/notes.txt"]


def test_other_checkpoints_are_not_copied() -> None:
    touch("model_def.py", "results/notes.txt")
    for storage in ("results/first", "second", "second"):
        assert files_below(write(storage)) == ["model_def.py", "results/notes.txt"]
