"""The map of modules, docs/project/map.md: as the docstrings are, after a first part that is written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.write_module_map import BEGIN, END, PAGE, Module, draw, read_rooms, to_markdown, write_map

LINES_BY_HAND = 150


def module(name: str, *imports: str) -> Module:
    return Module(Path(f"room/{name}.py"), f"room.{name}", "", "", frozenset(f"room.{other}" for other in imports))


def test_page_is_current_and_short() -> None:
    assert write_map() == PAGE.read_text().partition(BEGIN)[2].partition(END)[0], "run scripts/write_module_map.py"
    assert PAGE.read_text().partition(BEGIN)[0].count("\n") <= LINES_BY_HAND


def test_map_has_every_room() -> None:
    rooms = {folder.as_posix(): [found.file.name for found in room] for folder, room in read_rooms().items()}
    assert "run.py" in rooms["det_lightning/engine"]
    assert "module.py" in rooms["adapters"]
    assert "det_lightning/adapters" not in rooms


def test_modules_import_lower_rows() -> None:
    room = [module("run", "metrics", "schedule"), module("metrics"), module("schedule", "metrics"), module("events")]
    assert list(draw(room)) == ["|  run", "|  schedule", "|  events  metrics"]


@pytest.mark.parametrize(
    ("docstring", "cell"),
    [("``a|b``\nends", "`a\\|b` ends"), ("Uses :mod:`~det_lightning.units`.", "Uses `det_lightning.units`.")],
)
def test_docstring_becomes_markdown(docstring: str, cell: str) -> None:
    assert to_markdown(docstring) == cell
