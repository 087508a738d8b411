"""The style that no linter checks.

One assignment a line, no expression that hides a condition, no deep nesting, and no modules that need each other.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def packed_assignments(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each ``a, b = x, y`` that could as well be two statements; a swap could not."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = node.value.elts
        for target in node.targets:
            if isinstance(target, ast.Tuple) and len(target.elts) == len(values) and not reads_a_target(target, values):
                yield node


def reads_a_target(target: ast.Tuple, values: list[ast.expr]) -> bool:
    """Tell whether a value reads what an earlier target of the same statement has changed, or unpacks another one."""
    if any(isinstance(part, ast.Starred) for part in [*target.elts, *values]):
        return True
    read: set[str] = set()
    for changed, value in zip(reversed(target.elts), reversed(values), strict=True):
        if ast.unparse(changed) in read:
            return True
        read |= {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.expr)}
    return False


def products_with_truth(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each ``[...] * bool(x)``, which means ``[...] if x else []``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for side in (node.left, node.right):
                if isinstance(side, ast.Call) and isinstance(side.func, ast.Name) and side.func.id == "bool":
                    yield node


def calls_of_a_choice(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each ``(f if c else g)(x)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.IfExp):
            yield node


def blocks_too_deep(tree: ast.AST, outer_blocks: int = 0) -> Iterator[ast.AST]:
    """Yield each block that is inside of ``MOST_NESTED_BLOCKS`` others of its function; an ``elif`` is not inside."""
    for node in ast.iter_child_nodes(tree):
        starts_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
        is_elif = isinstance(tree, ast.If) and isinstance(node, ast.If) and tree.orelse == [node]
        around = 0 if starts_function else outer_blocks + (isinstance(node, BLOCKS) and not is_elif)
        if around > MOST_NESTED_BLOCKS:
            yield node
        else:
            yield from blocks_too_deep(node, around)


BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
MOST_NESTED_BLOCKS = 3
RULES = (packed_assignments, products_with_truth, calls_of_a_choice, blocks_too_deep)


def lines_found(text: str) -> list[int]:
    tree = ast.parse(text)
    return sorted({node.lineno for rule in RULES for node in rule(tree)})  # type: ignore[attr-defined]


def product_files() -> list[Path]:
    return sorted(file for room in ("det_lightning", "adapters", "callbacks") for file in (ROOT / room).rglob("*.py"))


PACKED = ("a, b = 1, 2", "self.a, self.b = x, y", "a, b = b, 1")
HIDING = ("x = [1] * bool(y)", "x = bool(y) * [1]", "(f if c else g)(x)")
OTHER = ("a, b = b, a", "a, b = 1, a", "a, b = f()", "a, *b = 1, *x", "x = 2 * y", "f(x) if c else g(x)")


@pytest.mark.parametrize("text", [*PACKED, *HIDING, *OTHER])
def test_it_is_found(text: str) -> None:
    assert lines_found(text) == ([] if text in OTHER else [1])


def test_deep_blocks_are_found() -> None:
    deep = "while a:\n with b:\n  for c in d:\n   if e: f()\n   elif g: h()"
    flat = "while a:\n with b:\n  if c: d()\n  elif e: f()\n  else:\n   def g():\n    if h: i()"
    assert lines_found(deep) == [4]
    assert lines_found(flat) == []


@pytest.mark.slow
def test_product_keeps_to_the_style() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in product_files()
        for line in lines_found(file.read_text(encoding="utf-8"))
    ]
    assert found == []


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
