"""Where checkpoints lie, and what of the working directory is copied into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
from tests.checkpoint.test_code_copy import touch


def write(root: Path | str, code_dir: Path | None = None) -> Path:
    files = CheckpointContent(state={}, trial_state=TrialState(), load_data={})
    return Path(root) / CheckpointStorage(root).write(files, code=code_dir)


def code_of(checkpoint: Path) -> list[str]:
    """Return what lies in the copy of the code: files, and folders with a slash."""
    code = checkpoint / "code"
    return sorted(f"{p.relative_to(code).as_posix()}{'/' * p.is_dir()}" for p in code.rglob("*"))


def test_checkpoint_is_found_by_id_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write(tmp_path)
    storage = CheckpointStorage(tmp_path)
    for name in (directory.name, directory, str(directory), f"file://{directory}"):
        assert storage.find(name) == str(directory)
    assert storage.list_ids() == [directory.name]
    monkeypatch.chdir(tmp_path)
    assert CheckpointStorage("elsewhere").find(directory.name) == str(directory), "a relative path without a slash"


def test_local_storages_have_their_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert CheckpointStorage().root.local_path == tmp_path / "determined", "this is Determined's"
    assert CheckpointStorage(f"file://{tmp_path}").root.local_path == tmp_path
    assert CheckpointStorage("~/here").root.local_path == Path.home() / "here"
    with pytest.raises(ValueError, match="must not be empty: pass a directory"):
        CheckpointStorage("")


def test_working_directory_is_copied(tmp_path: Path) -> None:
    touch("model_def.py", "package/module.py", ".git/HEAD", "package/__pycache__/x", "venv/pyvenv.cfg")
    checkpoint = write(tmp_path)
    assert code_of(checkpoint) == ["model_def.py", "package/", "package/module.py"]
    assert (checkpoint / "code/package/module.py").read_text() == "content"
    assert code_of(write(tmp_path, Path("package"))) == ["module.py"], "another directory was asked for"


@pytest.mark.parametrize("storage", ["output/checkpoints", "output/../output/checkpoints", "a link", "file URL"])
def test_storage_in_the_code_is_not_copied(storage: str) -> None:
    touch("model_def.py", "output/checkpoints/notes.txt")
    Path("a link").symlink_to("output/checkpoints")
    location = f"file://{Path.cwd()}/output/checkpoints" if storage == "file URL" else storage
    for _ in range(2):
        checkpoint = CheckpointStorage(location).root.local_path / write(location).name
    assert code_of(checkpoint) == ["model_def.py", "output/"]


@pytest.mark.parametrize("storage", [".", "../here"])
def test_checkpoints_in_working_directory_are_not_copied(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    touch("model_def.py", "package/module.py", "package/metadata.json/x", ".det_lightning/index/x/y.json")
    for _ in range(3):
        checkpoint = write(storage)
    assert code_of(checkpoint) == ["model_def.py", *(["package/", "package/metadata.json/", "package/metadata.json/x"]),
                                   "package/module.py"]  # fmt: skip


def test_remote_copy_is_not_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    touch("model_def.py", "tmp/notes.txt")
    monkeypatch.setattr("tempfile.tempdir", str(Path("tmp").resolve()))
    storage = CheckpointStorage("memory://copies")
    files = CheckpointContent(state={}, trial_state=TrialState(), load_data={})
    location = storage.root / storage.write(files)
    copied = [name for name in location.find_files() if name.startswith("code/")]
    location.remove()
    assert sorted(copied) == ["code/model_def.py", "code/tmp/notes.txt"]


def test_other_checkpoints_are_not_copied() -> None:
    touch("model_def.py", "results/notes.txt")
    first = write(Path("results/first"))
    for _ in range(2):
        second = write(Path("second"))
    assert code_of(first) == ["model_def.py", "results/", "results/notes.txt"]
    assert code_of(second) == ["model_def.py", "results/", "results/first/", "results/notes.txt"]
