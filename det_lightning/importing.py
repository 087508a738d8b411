"""Importing trial code from a directory, and classes by name."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import machinery
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from det_lightning.arguments import find_similar

# A second copy of this package would have different classes with the same names.
_OURS = "det_lightning"


def _find_shadowed_modules(directory: pathlib.Path) -> dict[str, ModuleType]:
    """Return the loaded modules that would be used instead of modules in ``directory`` with the same names.

    Leave out modules of Python itself and of installed packages.
    """
    names = {path.stem for path in directory.glob("*.py")} | {
        path.parent.name for path in directory.glob("*/__init__.py")
    }
    names -= {"__main__", _OURS, *sys.stdlib_module_names}
    shadowed = {name for name in names if name in sys.modules and not _is_installed(sys.modules[name])}
    return {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] in shadowed}


def _is_installed(module: ModuleType) -> bool:
    return bool({"site-packages", "dist-packages"} & {*pathlib.Path(getattr(module, "__file__", None) or "").parts})


def _find_modules_below(directory: pathlib.Path) -> dict[str, ModuleType]:
    """Return the loaded modules with a top-level module or package directly in ``directory``."""
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

    The block hides modules of the working directory, and earlier imports with the name of a module in ``path``. After
    the block, modules from ``path`` are forgotten, so that the next block can import others with the same names.
    Nothing is written to ``path`` (no ``__pycache__``).

    Example:
        >>> import pathlib
        >>> import det_lightning as det
        >>> pathlib.Path("older").mkdir()
        >>> _ = pathlib.Path("older", "sizes.py").write_text("HIDDEN = 16")
        >>> with det.import_from_path("older"):
        ...     import sizes
        >>> sizes.HIDDEN
        16
    """
    directory = pathlib.Path(path).resolve()
    here = pathlib.Path.cwd().resolve()
    old_path = sys.path[:]
    old_dont_write = sys.dont_write_bytecode
    hidden = {**_find_modules_below(here), **_find_shadowed_modules(directory)}
    for name in hidden:
        del sys.modules[name]
    sys.path[:] = [str(directory), *(p for p in old_path if p not in ("", str(here)))]
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in _find_modules_below(directory):
            del sys.modules[name]
        sys.modules.update(hidden)
        sys.path[:] = old_path
        sys.dont_write_bytecode = old_dont_write


@contextlib.contextmanager
def import_only(path: str | os.PathLike[str], files: Iterable[pathlib.Path]) -> Iterator[None]:
    """Import from ``path`` as :func:`import_from_path` does, but only the ``files`` in ``path``.

    Bytecode in a ``__pycache__`` is not used, because it need not match the source.
    """
    directory = pathlib.Path(path).resolve()
    hook = _make_hook(directory, frozenset(str(file.resolve()) for file in files))
    sys.path_hooks.insert(0, hook)
    _forget_finders(directory)
    try:
        with import_from_path(directory):
            yield
    finally:
        sys.path_hooks.remove(hook)
        _forget_finders(directory)


class _SourceLoader(machinery.SourceFileLoader):
    """Compiles the source, ignoring bytecode beside it."""

    def path_stats(self, path: Any) -> Any:
        raise OSError(f"the bytecode of {path} is not used")  # for the import system there is no bytecode


_LOADERS = (
    [(suffix, machinery.ExtensionFileLoader) for suffix in machinery.EXTENSION_SUFFIXES]
    + [(suffix, _SourceLoader) for suffix in machinery.SOURCE_SUFFIXES]
    + [(suffix, machinery.SourcelessFileLoader) for suffix in machinery.BYTECODE_SUFFIXES]
)


class _Finder(machinery.FileFinder):
    """Finds modules among given files of a directory, and ignores everything else."""

    def __init__(self, path: str, allowed: frozenset[str]) -> None:
        super().__init__(path)
        self._allowed = allowed

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> machinery.ModuleSpec | None:
        base = str(pathlib.Path(self.path, fullname.rpartition(".")[2]))
        for stem, locations in ((str(pathlib.Path(base, "__init__")), [base]), (base, None)):
            for suffix, loader in _LOADERS:
                if (file := stem + suffix) in self._allowed:
                    return spec_from_file_location(
                        fullname, file, loader=loader(fullname, file), submodule_search_locations=locations
                    )
        if any(file.startswith(base + os.sep) for file in self._allowed):
            namespace = machinery.ModuleSpec(fullname, None, is_package=True)
            namespace.submodule_search_locations = [base]
            return namespace
        return None


def _make_hook(directory: pathlib.Path, allowed: frozenset[str]) -> Callable[[str], _Finder]:
    def hook(path: str) -> _Finder:
        resolved = pathlib.Path(path).resolve()
        if not resolved.is_relative_to(directory):
            raise ImportError(f"{path} is not in {directory}")  # asks the import system to try the next hook
        return _Finder(str(resolved), allowed)

    return hook


def _forget_finders(directory: pathlib.Path) -> None:
    for path in list(sys.path_importer_cache):
        if pathlib.Path(path).resolve().is_relative_to(directory):
            del sys.path_importer_cache[path]


def split_spec(spec: str) -> tuple[str, str]:
    """Split ``"module:Class"`` or ``"path/file.py:Class"`` into module and class, which are empty if missing."""
    module, _, name = spec.strip().rpartition(":")
    if module.endswith(".py"):
        module = ".".join(pathlib.PurePath(module).with_suffix("").parts)
    return module, name


def load_class(spec: str) -> Any:
    """Import the object named by ``spec``, as ``"module:Class"`` or ``"module:Outer.Inner"``.

    Raises:
        ImportError: there is no such module, or nothing with that name inside.
    """
    module_name, qualified_name = split_spec(spec)
    found: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        if not hasattr(found, name):
            near = find_similar(name, [one for one, value in vars(found).items() if isinstance(value, type)])
            hint = "" if near is None else f"; did you mean {near}?"
            raise ImportError(
                f"There is no {qualified_name} in module {module_name} ({found.__name__} has no {name}{hint})."
            )
        found = getattr(found, name)
    return found
