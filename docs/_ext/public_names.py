"""The directive ``public-names``: the documentation of all names that a module offers in ``__all__``."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

#: The public modules. If several offer the same object, the first documents the object.
MODULES = (
    "det_lightning.errors",
    "det_lightning.core",
    "det_lightning.pytorch",
    "det_lightning.pytorch.experimental",
    "det_lightning.adapters",
    "det_lightning.adapters.strategies",
    "det_lightning.callbacks",
    "det_lightning.checkpoint",
    "det_lightning.testing",
    "det_lightning.experimental",
    "det_lightning.util",
    "det_lightning.horovod",
    "det_lightning",
)
#: Classes of objects that users get and do not make: the arguments of these constructors may change.
GIVEN = (
    "CheckpointContext",
    "CheckpointLoadContext",
    "CheckpointPolicy",
    "Context",
    "ExperimentalCoreContext",
    "PreemptContext",
    "ProfilerContext",
    "PyTorchExperimentalContext",
    "PyTorchTrialContext",
    "SearcherContext",
    "SearcherOperation",
    "TorchBatchProcessorContext",
    "TrainContext",
    "TrainedTrial",
)


class PublicNames(SphinxDirective):
    """Show each name of ``__all__``, or refer to the public module that shows the name already."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the documentation."""
        return self.parse_text_to_nodes("\n".join(write_module(self.arguments[0])))


def write_module(module_name: str) -> Iterator[str]:
    """Yield the reStructuredText for a module."""
    module = importlib.import_module(module_name)
    for name in sorted(module.__all__, key=str.lower):
        yield f".. py:currentmodule:: {module_name}"
        yield ""
        yield from write_name(module_name, name, getattr(module, name))
        yield ""


def write_name(module_name: str, name: str, value: Any) -> Iterator[str]:
    """Yield the directive for one name."""
    path = f"{module_name}.{name}"
    home = find_home(value)
    if inspect.ismodule(value):
        yield f":py:mod:`{path}`" if path in MODULES else f".. automodule:: {path}"
    elif home not in (None, path):
        yield f".. py:data:: {name}"
        yield ""
        yield f"   The same as :py:obj:`{home}`."
    elif inspect.isclass(value):
        yield f".. autoclass:: {path}{'()' if name in GIVEN else ''}"
        if issubclass(value, BaseException):
            yield "   :show-inheritance:"
        if members := list_members(value):
            yield f"   :members: {', '.join(members)}"
    elif inspect.isroutine(value):
        yield f".. autofunction:: {path}"
    else:
        yield f".. autodata:: {path}"
        yield "   :no-value:"


def find_home(value: Any) -> str | None:
    """Return the path at which a class or a function is documented; None for any other value."""
    if not inspect.isclass(value) and not inspect.isroutine(value):
        return None
    modules = map(importlib.import_module, MODULES)
    return next(f"{m.__name__}.{name}" for m in modules for name in m.__all__ if getattr(m, name) is value)


def list_members(shown: type) -> list[str]:
    """Return the names of the documented members that det_lightning defines; other libraries document theirs."""
    defined = {name: value for one in reversed(shown.__mro__) for name, value in vars(one).items() if is_ours(one)}
    members = {name for name, value in defined.items() if name[0] != "_" and inspect.getdoc(value)}
    if issubclass(shown, enum.Enum):
        members |= set(shown.__members__)
    return [name for name in defined if name in members and not is_plain(defined[name])]


def is_ours(defining: type) -> bool:
    """Say whether a class is one of det_lightning."""
    return defining.__module__.partition(".")[0] == "det_lightning"


def is_plain(value: Any) -> bool:
    """Say whether the documentation of a value is that of its type, such as a number's."""
    return isinstance(value, (int, float, str, dict, tuple, type(None))) and not isinstance(value, enum.Enum)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True}
