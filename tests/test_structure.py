"""Which modules import which: no cycles, and one module that imports Lightning."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def product_files() -> list[Path]:
    return sorted(file for room in ("det_lightning", "adapters", "callbacks") for file in (ROOT / room).rglob("*.py"))


def imported_modules(text: str) -> Iterator[str]:
    """Yield the modules that a text imports anywhere, for types alone or inside of functions too, and their names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *[f"{node.module}.{alias.name}" for alias in node.names])


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    package = parts if parts[0] == "det_lightning" else ("det_lightning", *parts)
    return ".".join(part for part in package if part != "__init__")


@pytest.mark.slow
def test_imports_have_no_cycle() -> None:
    texts = {module_name(file): file.read_text(encoding="utf-8") for file in product_files()}
    packages = {module_name(file) for file in product_files() if file.name == "__init__.py"}
    imports = {
        # A package that is imported for one of its modules does not count: Python imports it in any case.
        module: {name for name in imported_modules(text) if name in texts and name not in packages | {module}}
        for module, text in texts.items()
    }
    graphlib.TopologicalSorter(imports).prepare()  # raises a CycleError that names them


@pytest.mark.slow
def test_one_module_imports_lightning() -> None:
    lightning = {"lightning", "lightning_fabric", "pytorch_lightning"}
    importing = {
        file.relative_to(ROOT).as_posix().replace("det_lightning/adapters", "adapters")
        for file in product_files()
        if {name.partition(".")[0] for name in imported_modules(file.read_text(encoding="utf-8"))} & lightning
    }
    assert importing == {"adapters/lightning_package.py"}
