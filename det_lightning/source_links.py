"""The packages that are symbolic links in a clone, where git wrote the links as text."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from det_lightning.errors import MissingLinks

_PACKAGE = Path(__file__).parent
_LINKED = {"det_lightning.adapters": _PACKAGE / "adapters", "det_lightning.callbacks": _PACKAGE / "callbacks"}


class _MissingLinkFinder(importlib.abc.MetaPathFinder):
    """Raises the error for a link that is a text file; asked last, since an installed clone needs no links."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        link = _LINKED.get(fullname)
        if link is not None and link.is_file():
            raise MissingLinks(
                f"{link} is a text file and not a link to the package: git has written it so because core.symlinks is "
                "false, as it is on Windows. Either install the clone with pip (pip install -e .), or run "
                "'git config core.symlinks true' and 'git checkout -- det_lightning/adapters det_lightning/callbacks', "
                "which on Windows needs the developer mode.",
                name=fullname,
                path=str(link),
            )
        return None


def explain_missing_links() -> None:
    """Let the import of a package whose link is missing raise the error that says so; repeating it changes nothing."""
    if not any(isinstance(finder, _MissingLinkFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MissingLinkFinder())
