"""How what is said of the parts of Determined that are not here is raised, at run time."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from det_lightning.errors import UnsupportedAttribute, UnsupportedPart
from det_lightning.parts_of_determined import missing_part, topic_of

_THEIRS = "determined"
_OURS = "det_lightning"
#: Names that our package has too, for something else.
_SOMETHING_ELSE = ("determined.cli",)


class UnsupportedImport(UnsupportedPart, ModuleNotFoundError):
    """Raised where a module is imported."""


def import_error(path: str) -> ImportError:
    """Return the error for the import of a part that is not here."""
    return UnsupportedImport(str(missing_part(path)), name=path)


def attribute_error(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module of ours does not have, be it a part of Determined or not."""
    path = _by_their_name(f"{module}.{name}")
    if topic_of(path) == _THEIRS or name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return UnsupportedAttribute(str(missing_part(path)))


def is_something_else(path: str) -> bool:
    """Return whether what our package has at the place of a module of Determined is something else."""
    return any(f"{path}.".startswith(f"{taken}.") for taken in _SOMETHING_ELSE)


def _by_their_name(name: str) -> str:
    return _THEIRS + name.removeprefix(_OURS)


class _MissingPartFinder(importlib.abc.MetaPathFinder):
    """Raises the error for parts that are not here; asked last, when no other finder has the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        theirs = _by_their_name(fullname)
        if fullname.startswith(f"{_OURS}.") and topic_of(theirs) != _THEIRS:
            raise import_error(theirs)
        return None


def explain_imports() -> None:
    """Let the import of a part that is not here raise the error that says so; calling it again changes nothing."""
    if not any(isinstance(finder, _MissingPartFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MissingPartFinder())
