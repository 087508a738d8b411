"""Importing a trial's class, anew for each run, as a new process would."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from det_lightning.compat import answering_determined
from det_lightning.testing.outcomes import BadTrial
from det_lightning.testing.own_code import is_own_file, own_frames

__all__ = ["GivenTrial", "ImportedTrial", "TrialSource"]

_OURS = "det_lightning"
# pytest goes on using the first one.
_KEPT = {"__main__", "conftest", _OURS}


class TrialSource(Protocol):
    """Where a trial's class comes from."""

    name: str
    spec: str
    directory: Path

    def imported(self) -> contextlib.AbstractContextManager[type]:
        """Give the class inside of a ``with`` block; what runs inside may import more of the trial's modules."""

    def modules(self) -> list[ModuleType]:
        """Return the modules of the trial's own code; only inside of such a block."""


class GivenTrial:
    """A class that is there already; its module is imported once, so what is kept in globals stays between runs.

    Args:
        trial_class: the trial's.
    """

    def __init__(self, trial_class: type) -> None:
        self.name = trial_class.__qualname__
        self.spec = f"{trial_class.__module__}:{trial_class.__qualname__}"
        self._class = trial_class
        self.directory = Path(inspect.getsourcefile(trial_class) or ".").resolve().parent

    @contextlib.contextmanager
    def imported(self) -> Iterator[type]:
        """Give the class."""
        yield self._class

    def modules(self) -> list[ModuleType]:
        """Return the module of the class."""
        return [sys.modules[self._class.__module__]] if self._class.__module__ in sys.modules else []


class ImportedTrial:
    """A class that is imported by name, with ``import determined`` answered by det_lightning.

    Each block imports the trial's modules again and forgets them afterwards: what a trial keeps in globals or on
    classes begins anew, as in a new process, and what it does to environment and working directory is undone. Modules
    that cannot be imported a second time stay as they are.

    Args:
        spec: ``"module:Class"`` or ``"path/to/file.py:Class"``.
        directory: where modules are looked for first.

    Attributes:
        spec: as ``"module:Class"`` in any case, for imports from ``directory``.

    Raises:
        BadTrial: ``spec`` has another form.
    """

    def __init__(self, spec: str, directory: Path) -> None:
        module, _, self._class_name = spec.rpartition(":")
        if not module or not self._class_name:
            raise BadTrial(f"--trial must be module:Class, such as model_def:MyTrial; got {spec!r}.")
        if module.endswith(".py"):
            file = directory / module
            directory, module = file.parent, file.stem
        self._module_name = module
        self.name = spec
        self.spec = f"{module}:{self._class_name}"
        self.directory = directory.resolve()
        self._first_import: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def imported(self) -> Iterator[type]:
        """Give the class.

        Raises:
            BadTrial: the module does not import, or has no such trial; the message tells all that is known.
        """
        path, hidden = sys.path[:], _forget_modules_below(self.directory)
        environment, working_directory = dict(os.environ), Path.cwd()
        sys.path.insert(0, str(self.directory))
        importlib.invalidate_caches()
        try:
            with answering_determined():
                yield self._find_class(self._import_module())
        finally:
            own = _forget_modules_below(self.directory)
            self._first_import = self._first_import or (own if self._module_name in own else {})
            sys.modules.update(hidden)
            sys.path[:] = path
            os.chdir(working_directory)
            if os.environ != environment:
                os.environ.clear()
                os.environ.update(environment)

    def modules(self) -> list[ModuleType]:
        """Return what was imported from below the directory."""
        return [module for name, module in sys.modules.copy().items() if _is_below(self.directory, name, module)]

    def _import_module(self) -> ModuleType:
        try:
            return self._import_anew()
        except BadTrial:
            if self._module_name not in self._first_import:
                raise
            # Some modules can be run once only, such as those that register something under a name.
            sys.modules.update(self._first_import)
            return self._first_import[self._module_name]

    def _import_anew(self) -> ModuleType:
        try:
            return importlib.import_module(self._module_name)
        except ModuleNotFoundError as e:
            if e.name is not None and f"{self._module_name}.".startswith(f"{e.name}."):
                raise BadTrial(self._no_module()) from None
            raise BadTrial(f"{self._module_name} cannot be imported:\n{own_frames(e, self.directory)}") from None
        except (Exception, SystemExit) as e:  # running a module may raise anything
            raise BadTrial(f"{self._module_name} cannot be imported:\n{own_frames(e, self.directory)}") from None

    def _no_module(self) -> str:
        here = sorted(path.stem for path in self.directory.glob("*.py"))
        modules = f"The modules there are {', '.join(here)}" if here else "There are no modules there"
        return f"There is no module {self._module_name!r} in {self.directory}. {modules}."

    def _find_class(self, module: ModuleType) -> type:
        found: Any = module
        for name in self._class_name.split("."):
            found = getattr(found, name, None)
        if _is_trial(found):
            return found  # type: ignore[no-any-return]
        trials = [name for name, value in vars(module).items() if _is_trial(value)]
        listed = f"The trials in it are: {', '.join(trials)}." if trials else "There are no trials in it."
        close = difflib.get_close_matches(self._class_name, trials, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        what = "has no class" if found is None else f"is no PyTorchTrial but {found!r}:"
        subject = self._module_name if found is None else f"{self._module_name}:{self._class_name}"
        raise BadTrial(f"{subject} {what} {self._class_name}. {listed}{hint}")


def _is_trial(value: Any) -> bool:
    from det_lightning.pytorch import PyTorchTrial

    return isinstance(value, type) and issubclass(value, PyTorchTrial) and value is not PyTorchTrial


def _forget_modules_below(directory: Path) -> dict[str, ModuleType]:
    own = {name: module for name, module in sys.modules.items() if _is_below(directory, name, module)}
    for name in own:
        del sys.modules[name]
    return own


def _is_below(directory: Path, name: str, module: Any) -> bool:
    if name.partition(".")[0] in _KEPT:
        return False
    file = getattr(module, "__file__", None)
    try:
        places = [file] if isinstance(file, str) else [str(place) for place in getattr(module, "__path__", None) or ()]
    except Exception:  # modules made by others may answer with anything
        return False
    return any(is_own_file(place, directory) for place in places)
