"""Importing trial code from a directory that is not the working directory."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from det_lightning.importing import import_from_path, load_class

MODULE = "a_trial_of_this_test"


def write_module(directory: Path, value: str, name: str = MODULE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.py").write_text(f"VALUE = {value!r}\n")
    return directory


def test_imports_end_and_leave_nothing(tmp_path: Path) -> None:
    before = sys.path[:]
    with import_from_path(write_module(tmp_path, "in the directory")):
        assert importlib.import_module(MODULE).VALUE == "in the directory"
    assert sys.path == before
    assert MODULE not in sys.modules
    assert [path.name for path in tmp_path.iterdir()] == [f"{MODULE}.py"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(MODULE)


@pytest.mark.parametrize("where", [".", "elsewhere"])
def test_other_directories_are_hidden(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was imported from the working directory or elsewhere comes back after the block."""
    monkeypatch.syspath_prepend(str(write_module(Path(where).absolute(), "outside")))
    mine = importlib.import_module(MODULE)
    try:
        with import_from_path(write_module(tmp_path, "in the directory")):
            assert importlib.import_module(MODULE).VALUE == "in the directory"
        assert sys.modules[MODULE] is mine
        assert mine.VALUE == "outside"
    finally:
        del sys.modules[MODULE]


@pytest.mark.parametrize("name", ["json", "torch", "det_lightning"])
def test_packages_are_not_imported_twice(tmp_path: Path, name: str) -> None:
    before = importlib.import_module(name)
    with import_from_path(write_module(tmp_path, "in the directory", name)):
        assert importlib.import_module(name) is before


def test_missing_module_is_not_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_module(Path.cwd(), "in the working directory")))
    with import_from_path(tmp_path), pytest.raises(ModuleNotFoundError):
        importlib.import_module(MODULE)


def test_packages_are_forgotten(tmp_path: Path) -> None:
    write_module(tmp_path / "a_package", "", "__init__")
    write_module(tmp_path / "a_package", "deep", "inner")
    with import_from_path(tmp_path):
        assert importlib.import_module("a_package.inner").VALUE == "deep"
    assert not [name for name in sys.modules if name.startswith("a_package")]


def test_error_puts_everything_back(tmp_path: Path) -> None:
    path, flag = sys.path[:], sys.dont_write_bytecode
    with pytest.raises(RuntimeError, match="inside"), import_from_path(write_module(tmp_path, "")):
        importlib.import_module(MODULE)
        raise RuntimeError("inside")
    assert (sys.path, sys.dont_write_bytecode) == (path, flag)
    assert MODULE not in sys.modules


def test_relative_directories_are_imported_from() -> None:
    write_module(Path("below"), "relative")
    with import_from_path("below"):
        assert importlib.import_module(MODULE).VALUE == "relative"


def test_class_is_found() -> None:
    assert load_class("pathlib:Path") is Path
    assert load_class("importlib/metadata.py:PackageNotFoundError") is importlib.metadata.PackageNotFoundError
    assert load_class("det_lightning.pytorch:LRScheduler.StepMode").__qualname__ == "LRScheduler.StepMode"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pathlib:Trial", r"There is no Trial in module pathlib \(pathlib has no Trial\)"),
        ("pathlib:PurePaht", r"\(pathlib has no PurePaht; did you mean PurePath\?\)"),
        ("no_such_module_anywhere:Trial", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_missing_class_is_named(spec: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        load_class(spec)
