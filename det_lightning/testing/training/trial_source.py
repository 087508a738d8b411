"""Importing a trial's class anew for each run, as a new process would."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from det_lightning.compat import answering_determined
from det_lightning.pytorch import PyTorchTrial
from det_lightning.testing.checks import BadTrial

# pytest and this plugin keep using their first import.
_KEPT = {"__main__", "conftest", "det_lightning"}
_MANY_FILES = 10_000
_PACKAGE = str(Path(__file__).parents[2])
_OBSERVING = (__file__, str(Path(__file__).parents[1] / "observation"))
# Functions of det_lightning that call optimizers, schedulers and backward passes, possibly through the user's code.
_ACTING = {"backward", "step", "step_optimizer", "synchronize", "_step_lr_schedulers"}


class GivenTrial:
    """A class that is imported already; its globals keep their values between runs."""

    def __init__(self, trial_class: type) -> None:
        self.name = trial_class.__qualname__  # for messages
        self.spec = f"{trial_class.__module__}:{trial_class.__qualname__}"
        self.directory = Path(inspect.getsourcefile(trial_class) or ".").resolve().parent  # of the trial's code
        self._class = trial_class

    @contextlib.contextmanager
    def import_class(self) -> Iterator[type]:
        yield self._class

    def modules(self) -> list[ModuleType]:
        """Return the imported modules of the trial's own code; only within such a block."""
        return [sys.modules[self._class.__module__]] if self._class.__module__ in sys.modules else []


class ImportedTrial:
    """A class to import by name from ``directory``, with ``determined`` as an alias of det_lightning.

    Each block imports the trial's modules again, so that globals and class attributes start as in a new process, and
    restores the environment and the working directory. A module that fails to import a second time is kept.
    """

    def __init__(self, spec: str, directory: Path) -> None:
        self._module_name, _, self._class_name = spec.rpartition(":")
        if self._module_name.endswith(".py"):
            file = directory / self._module_name
            directory = file.parent
            self._module_name = file.stem
        self.name = spec
        self.spec = f"{self._module_name}:{self._class_name}"
        self.directory = directory.resolve()
        self._first_import: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def import_class(self) -> Iterator[type]:
        """Yield the class; raises BadTrial if the module cannot be imported, or has no such trial."""
        hidden = self._forget_modules()
        environment = dict(os.environ)
        # In this order, because the search path is restored as it was when it was patched.
        with answering_determined(), pytest.MonkeyPatch.context() as paths:
            paths.chdir(Path.cwd())  # restored at the end
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
        return list(self._find_own().values())

    def _forget_modules(self) -> dict[str, ModuleType]:
        own = self._find_own()
        for name in own:
            del sys.modules[name]
        return own

    def _find_own(self) -> dict[str, ModuleType]:
        modules = sys.modules.copy().items()
        return {name: module for name, module in modules if name.split(".", 1)[0] not in _KEPT and self._is_own(module)}

    def _is_own(self, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            return is_own_file(file, self.directory)
        try:
            return any(is_own_file(str(path), self.directory) for path in getattr(module, "__path__", None) or ())
        except Exception:  # a lazy module may raise anything
            return False

    def _import_module(self) -> ModuleType:
        try:
            return importlib.import_module(self._module_name)
        except (Exception, SystemExit) as e:  # a module may raise anything
            if self._module_name in self._first_import:
                # Some modules can be imported only once, such as those that register a name.
                sys.modules.update(self._first_import)
                return self._first_import[self._module_name]
            if isinstance(e, ModuleNotFoundError) and f"{self._module_name}.".startswith(f"{e.name}."):
                here = ", ".join(sorted(path.stem for path in self.directory.glob("*.py"))) or "none"
                message = f"There is no module {self._module_name!r} in {self.directory}. The modules there are {here}."
                raise BadTrial(message) from None
            raise BadTrial(f"{self._module_name} cannot be imported:\n{own_frames(e, self.directory)}") from None

    def _find_class(self, module: ModuleType) -> type:
        found: Any = module
        for name in self._class_name.split("."):
            found = getattr(found, name, None)
        if _is_trial(found):
            return found  # type: ignore[no-any-return]
        trials = [name for name, value in vars(module).items() if _is_trial(value)]
        close = difflib.get_close_matches(self._class_name, trials, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        advice = f"The trials in it are: {', '.join(trials) or 'none'}.{hint}"
        if found is None:
            raise BadTrial(f"{self._module_name} has no class {self._class_name}. {advice}")
        raise BadTrial(f"{self._module_name}:{self._class_name} is not a PyTorchTrial: {found!r}. {advice}")


TrialSource = GivenTrial | ImportedTrial


def _is_trial(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PyTorchTrial) and value is not PyTorchTrial


def is_own_file(file: str, directory: Path) -> bool:
    """Return whether a file is the user's code below ``directory``: neither an installed package nor det_lightning."""
    if not file.startswith(str(directory)):  # nearly all of thousands of files
        return False
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and path.is_relative_to(directory) and not path.is_relative_to(Path(__file__).parents[2])


def own_frames(error: BaseException, directory: Path) -> str:
    """Return the traceback of ``error``, shortened to the frames in the user's files, and the error itself."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own_file(frame.filename, directory)]
    for frame in own:
        frame.filename = str(Path(frame.filename).relative_to(directory))
    return f"{''.join(traceback.format_list(own))}{''.join(traceback.format_exception_only(error))}".rstrip()


def find_user_line(directory: Path, beyond_context: bool = False) -> str | None:
    """Return ``file:line`` of the innermost frame of the user's code below ``directory``, or None without one.

    With ``beyond_context``, return None if det_lightning called that code in order to step or to compute gradients.
    """
    line = None
    for frame, number in traceback.walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if beyond_context and file.startswith(_PACKAGE) and not file.startswith(_OBSERVING):
            return None if frame.f_code.co_name in _ACTING else line
        if line is None and is_own_file(file, directory):
            line = f"{Path(file).relative_to(directory)}:{number}"
    return line


def list_files(directories: Iterable[Path]) -> dict[Path, int]:
    """Return the files below directories and when they changed; if there are many, only some."""
    found: dict[Path, int] = {}
    for folder, folders, names in itertools.chain.from_iterable(map(os.walk, directories)):
        if len(found) > _MANY_FILES:
            break
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(OSError):  # a file that is removed meanwhile
                found[path] = path.stat().st_mtime_ns
    return found
