"""Importing det_lightning as ``determined``, for scripts with unchanged import lines."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

from det_lightning import missing_parts
from det_lightning.parts_of_determined import REFERENCE_VERSION

__all__ = ["answering_determined", "install"]

_THEIRS = "determined"
_MODEL_HUB = "model_hub"
_OURS = {_THEIRS: "det_lightning", _MODEL_HUB: "det_lightning.model_hub"}
#: With this directory on the search path, a process imports det_lightning as ``determined``.
ALIAS_DIRECTORY = pathlib.Path(__file__).resolve().parent / "alias"


class _Determined(ModuleType):
    """det_lightning under Determined's version number, which scripts compare."""

    __version__ = REFERENCE_VERSION

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_OURS[_THEIRS]], name)

    def __dir__(self) -> list[str]:
        return dir(sys.modules[_OURS[_THEIRS]])


class _AliasLoader(importlib.abc.Loader):
    """Loads a module of det_lightning under Determined's name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own_spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return _Determined(self._name, module.__doc__) if spec.name == _THEIRS else module

    def exec_module(self, module: ModuleType) -> None:
        # The module has run already, under the name in det_lightning; the import system has replaced the spec.
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of our module, which ``python -m`` runs."""
        found = importlib.util.find_spec(self._name)
        loader = None if found is None else found.loader
        if not isinstance(loader, importlib.abc.InspectLoader):
            raise ImportError(f"{self._name} has no code to run in place of {fullname}.", name=fullname)
        return loader.get_code(self._name)


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds ``determined``, ``model_hub`` and their submodules among our modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top not in _OURS or (top == _MODEL_HUB and _is_another_model_hub(rest)):
            return None
        ours = f"{_OURS[top]}.{rest}" if rest else _OURS[top]
        is_another_module = f"{fullname}.".startswith("determined.cli.")
        found = None if is_another_module else importlib.util.find_spec(ours)
        if found is None:
            raise missing_parts.import_error(fullname)
        is_package = found.submodule_search_locations is not None
        # The origin becomes sys.argv[0] of `python -m`.
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(ours), origin=found.origin, is_package=is_package)


def _is_another_model_hub(submodule: str) -> bool:
    """Return whether ``model_hub`` is a package of the project, unrelated to Determined's."""
    if submodule:
        return sys.modules[_MODEL_HUB].__name__ != _OURS[_MODEL_HUB]
    elsewhere = [folder for folder in sys.path if folder != str(ALIAS_DIRECTORY)]
    found = importlib.machinery.PathFinder.find_spec(_MODEL_HUB, elsewhere)
    if found is None:
        return False
    folders = [pathlib.Path(folder) for folder in found.submodule_search_locations or ()]
    return not any((folder / "huggingface").is_dir() for folder in folders)


def install() -> None:
    """Make ``import determined``, and imports of its submodules, return the modules of det_lightning.

    The same holds for ``model_hub``, unless there is another package of that name.

    This applies to the current process, and to children of :mod:`multiprocessing`, such as the workers of loaders, with
    ``fork``, ``spawn`` or ``forkserver``. A second call changes nothing.

    Raises:
        RuntimeError: the real determined is already imported.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    imported = sys.modules.get(_THEIRS)
    if imported is not None:
        raise RuntimeError(
            f"The real determined is imported already, from {getattr(imported, '__file__', 'an unknown file')}. Call "
            "det_lightning.compat.install() before the first import of determined."
        )
    sys.meta_path.insert(0, _AliasFinder())
    _add_to_search_path()


@contextlib.contextmanager
def answering_determined() -> Iterator[None]:
    """Act like :func:`install` inside a ``with`` block, even if the real determined is in use."""
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        yield
        return
    real = _forget_determined()
    finder = _AliasFinder()
    sys.meta_path.insert(0, finder)
    was_there = str(ALIAS_DIRECTORY) in sys.path  # as in the trials of an experiment
    _add_to_search_path()
    try:
        yield
    finally:
        if not was_there and str(ALIAS_DIRECTORY) in sys.path:
            sys.path.remove(str(ALIAS_DIRECTORY))
        sys.meta_path.remove(finder)
        _forget_determined()
        sys.modules.update(real)


def _add_to_search_path() -> None:
    """Let children find the alias: they inherit the search path, but not the finders."""
    # At index 1, because scripts take the first entry for the script's directory.
    if str(ALIAS_DIRECTORY) not in sys.path:
        sys.path.insert(1, str(ALIAS_DIRECTORY))


def _forget_determined() -> dict[str, ModuleType]:
    """Remove ``determined``, ``model_hub`` and all submodules from ``sys.modules``; return the modules."""
    names = [name for name in sys.modules if name.partition(".")[0] in _OURS]
    return {name: sys.modules.pop(name) for name in names}
