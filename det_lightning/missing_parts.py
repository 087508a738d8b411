"""Errors for missing parts of Determined and for broken links, and the commands that install missing libraries."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from det_lightning.errors import MissingLinks, UnsupportedAttribute, UnsupportedPart
from det_lightning.parts_of_determined import find_topic, missing_part

#: Whether the package index has a release. docs/project/release.md says when to change this.
IS_PUBLISHED = False

_THEIRS = "determined"
_OURS = "det_lightning"
#: The packages that are symbolic links in a clone.
_LINKED = {f"{_OURS}.{name}": Path(__file__).parent / name for name in ("adapters", "callbacks")}


class UnsupportedImport(UnsupportedPart, ModuleNotFoundError):
    """Raised for the import of a missing module."""


def import_error(path: str) -> ImportError:
    """Return the error for the import of a missing part."""
    return UnsupportedImport(str(missing_part(path)), name=path)


def attribute_error(module: str, name: str) -> AttributeError:
    """Return the error for a missing name of a module, whether or not the name is a part of Determined."""
    path = _by_their_name(f"{module}.{name}")
    if find_topic(path) == _THEIRS or name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return UnsupportedAttribute(str(missing_part(path)))


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, for example ``s3``."""
    if IS_PUBLISHED:
        return f"pip install 'det-lightning[{extra}]'"
    return f"pip install -e '.[{extra}]' in a clone of det_lightning"


def explain_requirement() -> str | None:
    """Return how to install det-lightning before a ported project's requirements; None once there is a release."""
    if IS_PUBLISHED:
        return None
    return "det-lightning has no release yet: install it from a clone (pip install -e CLONE) before the requirements."


def how_to_build_horovod() -> str:
    """Return how to install Horovod, for which there is no extra."""
    return (
        f"There are no wheels of Horovod: {how_to_install('horovod')} for the requirements, then run "
        "scripts/build_horovod.sh of det-lightning's source to build and install Horovod."
    )


def _by_their_name(name: str) -> str:
    return _THEIRS + name.removeprefix(_OURS)


class _LastFinder(importlib.abc.MetaPathFinder):
    """Raises the error for a module that no other finder has: it comes last, since installed clones need no links."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        theirs = _by_their_name(fullname)
        if fullname.startswith(f"{_OURS}.") and find_topic(theirs) != _THEIRS:
            raise import_error(theirs)
        link = _LINKED.get(fullname)
        if link is not None and link.is_file():
            raise MissingLinks(
                f"{link} is a text file and not a link to the package: git wrote the text file because core.symlinks "
                "is false, as it is on Windows. Either install the clone with pip (pip install -e .), or run 'git "
                "config core.symlinks true' and 'git checkout -- det_lightning/adapters det_lightning/callbacks', "
                "which on Windows needs the developer mode.",
                name=fullname,
                path=str(link),
            )
        return None


def explain_imports() -> None:
    """Make imports of missing parts raise an error with the reason; a second call changes nothing."""
    if not any(isinstance(finder, _LastFinder) for finder in sys.meta_path):
        sys.meta_path.append(_LastFinder())
