"""Importing a trial's class, again for each run, as a new process would."""

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

import pytest

from det_lightning.compat import answering_determined
from det_lightning.pytorch import PyTorchTrial
from det_lightning.testing.outcomes import BadTrial
from det_lightning.testing.own_code import is_own_file, own_frames

# pytest goes on using the first import of them.
_KEPT = {"__main__", "conftest", "det_lightning"}


class TrialSource(Protocol):
    """Where a trial's class comes from.

    Attributes:
        name: for messages.
        spec: ``"module:Class"``.
        directory: of the trial's code.
    """

    name: str
    spec: str
    directory: Path

    def imported(self) -> contextlib.AbstractContextManager[type]:
        """Give the class inside of a ``with`` block; what runs inside may import more of the trial's modules."""

    def modules(self) -> list[ModuleType]:
        """Return the modules of the trial's own code; only inside of such a block."""


class GivenTrial:
    """A class that is there already; its module is imported once, so what is kept in globals stays between runs."""

    def __init__(self, trial_class: type) -> None:
        self.name = trial_class.__qualname__
        self.spec = f"{trial_class.__module__}:{trial_class.__qualname__}"
        self.directory = Path(inspect.getsourcefile(trial_class) or ".").resolve().parent
        self._class = trial_class

    @contextlib.contextmanager
    def imported(self) -> Iterator[type]:
        yield self._class

    def modules(self) -> list[ModuleType]:
        return [sys.modules[self._class.__module__]] if self._class.__module__ in sys.modules else []


class ImportedTrial:
    """A class that is imported by name, with ``import determined`` answered by det_lightning.

    Each block imports the trial's modules again and forgets them afterwards: what a trial keeps in globals or on
    classes begins as in a new process, and what it does to environment and working directory is undone. Modules
    that cannot be imported a second time stay as they are.

    Args:
        spec: ``"module:Class"`` or ``"path/to/file.py:Class"``.
        directory: where modules are looked for first.

    Raises:
        BadTrial: ``spec`` has another form.
    """

    def __init__(self, spec: str, directory: Path) -> None:
        module, _, self._class_name = spec.rpartition(":")
        if not module or not self._class_name:
            raise BadTrial(f"--trial must be module:Class, such as model_def:MyTrial; got {spec!r}.")
        if module.endswith(".py"):
            file = directory / module
            directory = file.parent
            module = file.stem
        self._module_name = module
        self.name = spec
        self.spec = f"{module}:{self._class_name}"
        self.directory = directory.resolve()
        self._first_import: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def imported(self) -> Iterator[type]:
        """Give the class.

        Raises:
            BadTrial: the module does not import, or has no such trial; the message says all that is known.
        """
        hidden = self._forget_modules()
        environment = dict(os.environ)
        with pytest.MonkeyPatch.context() as paths, answering_determined():
            paths.chdir(Path.cwd())  # and back to it at the end
            paths.syspath_prepend(self.directory)
            try:
                yield self._find_class(self._import_module())
            finally:
                own = self._forget_modules()
                self._first_import = self._first_import or (own if self._module_name in own else {})
                sys.modules.update(hidden)
                os.environ.clear()
                os.environ.update(environment)

    def modules(self) -> list[ModuleType]:
        return [module for name, module in sys.modules.copy().items() if self._is_own(name, module)]

    def _forget_modules(self) -> dict[str, ModuleType]:
        own = {name: module for name, module in sys.modules.items() if self._is_own(name, module)}
        for name in own:
            del sys.modules[name]
        return own

    def _is_own(self, name: str, module: Any) -> bool:
        if name.partition(".")[0] in _KEPT:
            return False
        file = getattr(module, "__file__", None)
        try:
            files = [file] if isinstance(file, str) else [str(path) for path in getattr(module, "__path__", None) or ()]
        except Exception:  # modules made by others may answer with anything
            return False
        return any(is_own_file(file, self.directory) for file in files)

    def _import_module(self) -> ModuleType:
        try:
            return importlib.import_module(self._module_name)
        except (Exception, SystemExit) as e:  # running a module may raise anything
            if self._module_name in self._first_import:
                # Some modules can be run once only, such as those that register something under a name.
                sys.modules.update(self._first_import)
                return self._first_import[self._module_name]
            if isinstance(e, ModuleNotFoundError) and f"{self._module_name}.".startswith(f"{e.name}."):
                here = sorted(path.stem for path in self.directory.glob("*.py"))
                modules = f"The modules there are {', '.join(here)}" if here else "There are no modules there"
                message = f"There is no module {self._module_name!r} in {self.directory}. {modules}."
                raise BadTrial(message) from None
            raise BadTrial(f"{self._module_name} cannot be imported:\n{own_frames(e, self.directory)}") from None

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
        if found is None:
            raise BadTrial(f"{self._module_name} has no class {self._class_name}. {listed}{hint}")
        raise BadTrial(f"{self._module_name}:{self._class_name} is not a PyTorchTrial but {found!r}. {listed}{hint}")


def _is_trial(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PyTorchTrial) and value is not PyTorchTrial
