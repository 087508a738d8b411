"""The package of Lightning, ``lightning`` or ``pytorch_lightning``: all other modules import Lightning from here.

Both packages hold the same code, and a trainer of one package refuses the classes of the other. So the first import of
this module chooses a package: the value of ``DET_LIGHTNING_PACKAGE``, else the package already imported, else the
package named in the source of the importing program, else ``pytorch_lightning``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

VARIABLE = "DET_LIGHTNING_PACKAGE"
_DEFAULT = "pytorch_lightning"
# By the name in programs, the module with Lightning's classes.
_MODULES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}


def _choose() -> str:
    named = os.environ.get(VARIABLE)
    if named:
        if named not in _MODULES:
            raise ValueError(f"{VARIABLE} must be one of {', '.join(_MODULES)}, or unset; got {named!r}.")
        return named
    installed = [name for name, module in _MODULES.items() if _is_installed(module)]
    if len(installed) == 1:
        return installed[0]
    imported = [name for name, module in _MODULES.items() if module in sys.modules]
    if len(imported) == 1:
        return imported[0]
    return next((names.pop() for names in _search_sources() if len(names) == 1), _DEFAULT)


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported; a file or directory of the user may have the name of the package."""
    package, _, part = module.partition(".")
    spec = importlib.util.find_spec(package)
    folders = None if spec is None else spec.submodule_search_locations
    return any((pathlib.Path(folder) / part / "__init__.py").is_file() for folder in folders or ())


def _search_sources() -> Iterator[set[str]]:
    """Yield the imported packages of Lightning for each running file, innermost first."""
    frame = inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("det_lightning", "importlib"):
            continue
        source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
        if "lightning" in source:
            yield _find_imports(source)


def _find_imports(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a notebook's cell with magics
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} & _MODULES.keys()


#: The chosen package, by the name in programs.
PACKAGE = _choose()
#: The other package.
(OTHER,) = _MODULES.keys() - {PACKAGE}

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from pytorch_lightning.__version__ import version as lightning_version
    from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
    from pytorch_lightning.trainer.connectors.data_connector import _DataLoaderSource as DataLoaderSource
    from pytorch_lightning.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector as LoggerConnector,
    )
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn
else:
    pl = importlib.import_module(_MODULES[PACKAGE])
    _fabric = "lightning.fabric" if PACKAGE == "lightning" else "lightning_fabric"
    _environments = importlib.import_module(f"{_fabric}.plugins.environments")
    ClusterEnvironment = _environments.ClusterEnvironment
    LightningEnvironment = _environments.LightningEnvironment
    CheckpointConnector = pl.trainer.connectors.checkpoint_connector._CheckpointConnector
    DataLoaderSource = pl.trainer.connectors.data_connector._DataLoaderSource
    LoggerConnector = pl.trainer.connectors.logger_connector._LoggerConnector
    RunningStage = pl.trainer.states.RunningStage
    TrainerFn = pl.trainer.states.TrainerFn
    lightning_version = pl.__version__

__all__ = [
    "OTHER",
    "PACKAGE",
    "VARIABLE",
    "CheckpointConnector",
    "ClusterEnvironment",
    "DataLoaderSource",
    "LightningEnvironment",
    "LoggerConnector",
    "RunningStage",
    "TrainerFn",
    "lightning_version",
    "pl",
]
