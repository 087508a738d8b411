"""How the package is put together, as its source shows it."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.write_module_map import BEGIN, END, PAGE, Module, draw, read_rooms, to_markdown, write_map

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("det_lightning", "adapters", "callbacks")


@dataclasses.dataclass
class ClassSource:
    """What a class statement says: its bases by their last name, and the underscore names in its own methods."""

    name: str
    where: str
    bases: list[str]
    defines: set[str]
    reads: dict[str, int]


def private_attributes(body: ast.ClassDef) -> Iterator[ast.Attribute]:
    """Yield the underscore names of ``self``, ``cls`` and ``super()`` in a class statement."""
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super"):
                yield node


def class_source(statement: ast.ClassDef, file: str) -> ClassSource:
    found = ClassSource(statement.name, f"{file}:{statement.lineno}", [], set(), {})
    for base in statement.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        found.bases.append(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", ""))
    for node in statement.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.defines.add(node.name)
        elif isinstance(node, ast.Assign):
            found.defines.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.defines.add(node.target.id)
    for attribute in private_attributes(statement):
        if isinstance(attribute.ctx, ast.Load):
            found.reads.setdefault(attribute.attr, attribute.lineno)
        else:
            found.defines.add(attribute.attr)
    return found


def classes_in(source: str, file: str) -> list[ClassSource]:
    return [class_source(node, file) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def ancestors(child: ClassSource, classes: dict[str, list[ClassSource]]) -> Iterator[ClassSource]:
    for parent in (parent for base in child.bases for parent in classes.get(base, ())):
        yield parent
        yield from ancestors(parent, classes)


def reads_of_parents(sources: list[ClassSource]) -> list[str]:
    """Return each underscore name that a class reads through ``self`` and a parent class defines, as a sentence."""
    by_name: dict[str, list[ClassSource]] = {}
    for source in sources:
        by_name.setdefault(source.name, []).append(source)
    return [
        f"{child.where}: {child.name} reads self.{name} (line {line}), which {parent.name} defines"
        for child in sources
        for name, line in child.reads.items()
        for parent in ancestors(child, by_name)
        if name in parent.defines
    ]


@pytest.mark.slow
def test_no_class_reads_an_underscore_name_of_its_parent_class() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources = [found for path in files for found in classes_in(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert len(sources) > 100
    assert reads_of_parents(sources) == []


def test_such_a_read_is_noticed_two_classes_down() -> None:
    source = """
class Parent:
    def __init__(self):
        self._value = self.value = 0
    def _compute(self):
        return self._value
class Child(Parent):
    pass
class Grandchild(module.Child):
    def __init__(self):
        self._own = self.value
        self._value = self._own + other._value
    def method(self):
        return super()._compute() + self._value
"""
    problems = reads_of_parents(classes_in(source, "file.py"))
    assert {problem.split(" reads ")[1].split(" ")[0] for problem in problems} == {"self._compute", "self._value"}


def rooms() -> set[str]:
    """Return the modules and packages next to each other in det_lightning, and those of det_lightning.pytorch."""
    found = set()
    for package in ("det_lightning", "det_lightning/pytorch"):
        for path in (ROOT / package).iterdir():
            if path.suffix == ".py" or (path / "__init__.py").exists():
                found.add(f"{package.replace('/', '.')}.{path.stem}")
    return {room for room in found if not room.endswith(".__init__")} - {"det_lightning.pytorch"}


def test_one_contract_says_of_every_room_which_ones_it_may_import() -> None:
    # Python 3.10 has no TOML reader, and the list is plain enough to go without one.
    contracts = (ROOT / "pyproject.toml").read_text().split("[[tool.importlinter.contracts]]\n")[1:]
    (contract,) = [text for text in contracts if "det_lightning.adapters" in text and 'type = "layers"' in text]
    assert sorted(re.findall(r"det_lightning[\w.]+", contract)) == sorted(rooms())
    assert not any("ignore_imports" in text for text in contracts)


def test_tox_runs_each_file_that_needs_determined() -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "tox.ini")
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    marked = {file for file, text in texts.items() if re.search(r"pytest\.mark\.determined", text)}
    elsewhere = {file for file in marked if not file.startswith(("tests/conformance/", "tests/gpu/"))}
    assert elsewhere == {*settings["testenv:conformance"]["files"].split()} - {"tests/conformance"}


# The map of modules, docs/project/map.md: as the docstrings are, after a first part that is written by hand


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
