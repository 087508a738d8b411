"""Files of a directory from which this process has imported modules."""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["files_imported_from"]

_INSTALLED = {"site-packages", "dist-packages"}


def files_imported_from(directory: pathlib.Path) -> set[str]:
    """Return the files of loaded modules that lie in ``directory``, by their paths from there.

    Those of Python itself and of installed packages, as in a virtual environment there, are left out.
    """
    roots = (os.path.abspath(directory), os.path.realpath(directory))  # noqa: PTH100 (the first keeps links)
    pythons_own = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    found = {file: _path_below(roots, file) for file in _module_files()}
    return {
        relative.as_posix()
        for file, relative in found.items()
        if relative is not None
        and not _INSTALLED & {*relative.parts}
        and _path_below(pythons_own, os.path.realpath(file)) is None
    }


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = _attributes(module).get("__file__")
        if isinstance(file, str) and pathlib.Path(file).is_file():  # unlike "<stdin>"
            yield os.path.abspath(file)  # noqa: PTH100 (keeps links)


def _attributes(module: Any) -> dict[str, Any]:
    try:
        # Asking a lazy module in the usual way would import it.
        found = object.__getattribute__(module, "__dict__")
    except AttributeError:  # something else that stands for a module
        return {}
    return found if isinstance(found, dict) else {}


def _path_below(roots: Sequence[str], file: str) -> pathlib.PurePath | None:
    for root in roots:
        if file.startswith(root.rstrip(os.sep) + os.sep):
            return pathlib.PurePath(os.path.relpath(file, root))
    return None
