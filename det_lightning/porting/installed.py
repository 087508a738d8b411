"""What is installed: libraries and their names, read from files without importing them; code that asks for them."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from det_lightning.porting.bypass_rules import parse


@functools.cache
def find_roots() -> tuple[Path, ...]:
    """Return the directories with the installed packages."""
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return tuple(path for path in map(Path, [*site.getsitepackages(), *users]) if path.is_dir())


def is_installed(package: str) -> bool:
    """Return whether a package or module is installed, or comes with Python."""
    return package in sys.stdlib_module_names or any(_has(root, package) for root in find_roots())


@functools.cache
def find_release(package: str) -> str:
    """Return the name and the release of an installed package's distribution."""
    if package in sys.stdlib_module_names:
        return "Python {}.{}".format(*sys.version_info)
    names = importlib.metadata.packages_distributions().get(package, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else f"the installed {package}"


@functools.cache
def count_gpus() -> int:
    """Return the number of GPUs for CUDA in this machine."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout
    return sum(line.startswith(b"GPU ") for line in listed.splitlines())


def lacks_module(name: str) -> bool:
    """Return whether an installed package has no such module; False if the package may make modules when it runs."""
    parent, _, last = name.rpartition(".")
    source = _find_source(parent) if parent else None
    if source is None:
        return bool(parent) and lacks_module(parent)
    is_mentioned = re.search(rf"\b{last}\b", _read(source)) is not None
    return source.name == "__init__.py" and not is_mentioned and not _has(source.parent, last)


def lacks_name(module: str, name: str) -> bool:
    """Return whether a module certainly lacks a name that a type checker misses.

    Stubs leave names out, and protobuf and extension modules create names when they run.
    """
    if module.partition(".")[0] in sys.stdlib_module_names:
        return not name.startswith("_")
    source = _find_source(module)
    if source is None or source.stem.endswith("_pb2"):
        return False
    return name not in _find_bound_names(source)


@functools.cache
def _find_bound_names(source: Path) -> set[str]:
    return set(_walk_names(parse(_read(source)), source))


def _walk_names(tree: ast.Module, source: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield from _find_exports(node, source)
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _find_exports(node: ast.ImportFrom, source: Path) -> Iterator[str]:
    """Yield the names in an extension module without a stub from which a module imports ``*``."""
    roots = [source.parents[node.level - 1]] if node.level else find_roots()
    inner = Path(*(node.module or "").split("."))
    for directory in (root / inner.parent for root in roots):
        stubs = [directory / f"{inner.name}.pyi", directory / inner.name / "__init__.pyi"]
        if not any(stub.is_file() for stub in stubs):
            for binary in [*directory.glob(f"{inner.name}.*.so"), *directory.glob(f"{inner.name}.*.pyd")]:
                yield from (found.decode() for found in re.findall(rb"[A-Za-z_]\w+", binary.read_bytes()))


def _find_source(module: str) -> Path | None:
    inner = Path(*module.split("."))
    found = [path for root in find_roots() for path in (root / inner / "__init__.py", root / f"{inner}.py")]
    return next((path for path in found if path.is_file()), None)


def _has(directory: Path, name: str) -> bool:
    return (directory / name).is_dir() or any(directory.glob(f"{name}.*"))


def _read(source: Path) -> str:
    return source.read_text(encoding="utf-8", errors="replace")


# The checks; hasattr and getattr check for the mentioned names only.
_ASKS = re.compile(
    r"(?P<any>__version__|version_info|\bVersion\(|TYPE_CHECKING|ImportError|AttributeError|ModuleNotFoundError)"
    r"|hasattr|getattr",
    re.IGNORECASE,
)


class Guards:
    """The checks in a Python program."""

    def __init__(self, text: str) -> None:
        self._guarded = [*_find_guarded_lines(parse(text))]

    def hold(self, line: int, use: str) -> bool:
        """Return whether a line runs only with releases that have ``use``."""
        words = set(re.findall(r"\w+", use))
        return any(line in lines and (asked is None or not words.isdisjoint(asked)) for lines, asked in self._guarded)


def _find_guarded_lines(tree: ast.Module) -> Iterator[tuple[range, list[str] | None]]:
    """Yield the lines of code behind a check, and the words in the check; None if the check is for any name."""
    for node in ast.walk(tree):
        asked: list[ast.expr | None] = []
        if isinstance(node, ast.Try):
            asked = [handler.type for handler in node.handlers]
        elif isinstance(node, ast.If | ast.IfExp):
            asked = [node.test]
        for test in asked:
            source = ast.unparse(test) if test is not None else ""
            if (found := _ASKS.search(source)) and isinstance(node, ast.stmt | ast.expr):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                yield lines, None if found["any"] else re.findall(r"\w+", source)
