"""Importing trial code from a directory, and classes by their specification."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["import_from_path", "load_class"]

# A second copy of this package would know other classes of the same names.
_OURS = "det_lightning"


def _shadowed_modules(directory: pathlib.Path) -> dict[str, ModuleType]:
    """Return the loaded modules that would be taken in place of those in ``directory``, having the same names.

    Those of Python itself and of installed packages stay.
    """
    names = {path.stem for path in directory.glob("*.py")} | {
        path.parent.name for path in directory.glob("*/__init__.py")
    }
    names -= {"__main__", _OURS, *sys.stdlib_module_names}
    shadowed = {name for name in names if name in sys.modules and not _is_installed(sys.modules[name])}
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in shadowed}


def _is_installed(module: ModuleType) -> bool:
    return bool({"site-packages", "dist-packages"} & {*pathlib.Path(getattr(module, "__file__", None) or "").parts})


def _modules_below(directory: pathlib.Path) -> dict[str, ModuleType]:
    """Return the loaded modules whose top-level module or package lies directly in ``directory``."""
    top_level = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and "." not in name and name not in ("__main__", _OURS):
            path = pathlib.Path(file).resolve()
            if (path.parent.parent if path.name == "__init__.py" else path.parent) == directory:
                top_level.add(name)
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in top_level}


@contextlib.contextmanager
def import_from_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Import from ``path`` instead of the working directory, inside a ``with`` block.

    Modules of the working directory, and others that were imported before and would be taken instead of one of the same
    name, are hidden inside the block. Modules that the block imported from ``path`` are forgotten after it, so that the
    next block can import others of the same name. Nothing is written to ``path`` (no ``__pycache__``).
    """
    directory, here = pathlib.Path(path).resolve(), pathlib.Path.cwd().resolve()
    old_path, old_dont_write = sys.path[:], sys.dont_write_bytecode
    hidden = {**_modules_below(here), **_shadowed_modules(directory)}
    for name in hidden:
        del sys.modules[name]
    sys.path[:] = [str(directory), *(p for p in old_path if p not in ("", str(here)))]
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in _modules_below(directory):
            del sys.modules[name]
        sys.modules.update(hidden)
        sys.path[:] = old_path
        sys.dont_write_bytecode = old_dont_write


def load_class(spec: str) -> Any:
    """Import what ``spec`` names, as ``"module:Class"`` or ``"module:Outer.Inner"``.

    Raises:
        ImportError: there is no such module, or nothing of that name in it.
    """
    module_name, _, qualified_name = spec.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        if not hasattr(found, name):
            raise ImportError(f"There is no {qualified_name} in module {module_name} ({found.__name__} has no {name}).")
        found = getattr(found, name)
    return found
