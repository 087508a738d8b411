"""The errors of det_lightning, a type for each kind.

Errors about a misused trial API keep Determined's names and base classes, so that an ``except`` clause in a ported
script still works. Nearly all other errors derive from :class:`DetLightningError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from det_lightning.escaping import SafeMessage, escape, make_safe
from det_lightning.masking import mask_config
from det_lightning.parts_of_determined import missing_part

__all__ = [
    "PREEMPTED_EXIT_CODE",
    "CheckpointError",
    "CheckpointNotFound",
    "ConfigError",
    "ConfigMistake",
    "DamagedExperiment",
    "DetLightningError",
    "ExperimentError",
    "ExperimentInUse",
    "IncompleteCheckpointError",
    "InternalException",
    "InvalidCheckpointException",
    "InvalidConfigurationException",
    "InvalidDataTypeException",
    "InvalidExperimentException",
    "InvalidHP",
    "InvalidModelException",
    "MissingLinks",
    "Preempted",
    "ShouldExit",
    "StorageError",
    "UnsafeCheckpointError",
    "UnsupportedPart",
    "UnsupportedTrainerFlags",
]


__path__: list[str] = []  # the import of a missing name becomes an error with the reason

#: The exit code of a process that was preempted and has saved the run: ``EX_TEMPFAIL`` in Unix's ``sysexits.h``, "try
#: again later". Not 0, so that a scheduler that restarts failed jobs restarts this job.
PREEMPTED_EXIT_CODE = 75


class DetLightningError(SafeMessage, Exception):
    """Base class of errors without a counterpart in Determined."""


class InvalidExperimentException(SafeMessage, BaseException):
    """The trial uses the API in a way that cannot work.

    As in Determined, this derives from :class:`BaseException`, so that an ``except Exception`` in a trial does not hide
    the error.
    """


class InvalidModelException(InvalidExperimentException):
    """The model cannot be used with the chosen features."""


class InvalidDataTypeException(InvalidExperimentException):
    """A value has a type that the data path cannot handle."""

    def __init__(self, typ: type, message: str) -> None:
        super().__init__(f"Invalid data type ({typ.__name__}): {message}.")


class InvalidConfigurationException(InvalidExperimentException):
    """The experiment configuration cannot be used."""

    def __init__(self, config: dict[str, Any], message: str) -> None:
        super().__init__(f"Invalid configuration ({mask_config(config)}): {message}.")


class InternalException(SafeMessage, Exception):
    """A value was requested too early in the run."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidHP(SafeMessage, Exception):
    """Raised by a trial to give up on the hyperparameters: the run saves a checkpoint and ends.

    Args:
        msg: why these hyperparameters cannot be used.

    Raises:
        TypeError: ``msg`` is not a string.

    Example:
        >>> import det_lightning as det
        >>> def build(context):
        ...     if context.get_hparam("layers") > 100:
        ...         raise det.InvalidHP("too many layers")
    """

    def __init__(self, msg: str = "...") -> None:
        if not isinstance(msg, str):
            raise TypeError(f"InvalidHP takes its message as a string; got {msg!r} of type {type(msg).__name__}.")
        super().__init__(msg)
        self.msg = msg


class ConfigMistake(NamedTuple):
    """A mistake in an experiment configuration.

    Args:
        line: the line of the file, counted from 1; None if there is no file.
        path: the keys that lead to the value, such as ``searcher.max_length`` or ``bind_mounts[0].host_path``.
        message: the mistake, and the correction.

    Example:
        >>> from det_lightning.errors import ConfigError
        >>> from det_lightning.config import read_config
        >>> try:
        ...     read_config({"searcher": {"name": "single", "max_trails": 3}})
        ... except ConfigError as error:
        ...     [mistake.path for mistake in error.mistakes]
        ['entrypoint', 'searcher.max_trails']
    """

    line: int | None
    path: str
    message: str

    def position(self) -> tuple[int, str]:
        """Return a key that sorts mistakes in the order of the file."""
        return self.line or 0, self.path

    def __str__(self) -> str:
        where = [f"line {self.line}"] if self.line is not None else []
        return escape(": ".join([*where, *([self.path] if self.path else []), self.message]))


class ConfigError(DetLightningError, ValueError):
    """An experiment configuration cannot be used.

    Args:
        name: the source, usually the name of a file.
        mistakes: all mistakes, in the order of the file.
    """

    def __init__(self, name: str, mistakes: Sequence[ConfigMistake]) -> None:
        super().__init__(name, mistakes)
        self.name = name
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        if len(self.mistakes) == 1:
            return make_safe(f"{self.name}: {self.mistakes[0]}")
        return make_safe("\n  ".join([f"{self.name} has {len(self.mistakes)} mistakes:", *map(str, self.mistakes)]))


class ExperimentError(DetLightningError):
    """An experiment cannot be created, run or read."""


class ExperimentInUse(ExperimentError):
    """Another process runs the experiment."""


class DamagedExperiment(ExperimentError):
    """The files of an experiment do not fit together."""


class CheckpointError(DetLightningError):
    """A checkpoint cannot be read, written or used."""


class InvalidCheckpointException(CheckpointError, RuntimeError):
    """The content of a checkpoint does not fit the trial.

    Also a ``RuntimeError``, as from torch's ``load_state_dict`` and from resuming in Determined.
    """


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given location."""


class IncompleteCheckpointError(CheckpointError):
    """The checkpoint was not completely written, or a file is damaged."""


class UnsafeCheckpointError(CheckpointError):
    """Reading the checkpoint would run code inside, or follow a path out of the checkpoint."""


class StorageError(CheckpointError):
    """The storage of the checkpoints cannot be reached, or refuses an operation."""


class ShouldExit(Exception):
    """Raised by a trial or a callback to end the run at once, without an error.

    Args:
        skip_exit_checkpoint: do not save the batches since the latest checkpoint.
    """

    def __init__(self, skip_exit_checkpoint: bool = False) -> None:
        super().__init__("The trial asked to end the run.")
        self.skip_exit_checkpoint = skip_exit_checkpoint


class Preempted(SystemExit):
    """Raised by ``fit`` when the process was preempted and the run is saved.

    Unless a script catches ``SystemExit``, the process ends with the exit code; ``except Exception`` lets this pass.

    Args:
        code: the exit code.
    """

    def __init__(self, code: int = PREEMPTED_EXIT_CODE) -> None:
        super().__init__(code)


class UnsupportedPart(DetLightningError):
    """A part of Determined that is missing in det_lightning; the message has the reason and the replacement.

    Also a ``ModuleNotFoundError`` for an imported module, or an ``AttributeError`` for an attribute.
    """


class UnsupportedAttribute(UnsupportedPart, AttributeError):
    """A name was looked up that only Determined has; ``hasattr`` returns False."""


class MissingLinks(DetLightningError, ImportError):
    """A clone without installation has text files in place of symbolic links; the message says how to proceed."""


class UnsupportedTrainerFlags(DetLightningError, ValueError):
    """A flag of ``pl.Trainer`` that cannot work with a trial; the message names the replacement."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise UnsupportedAttribute(str(missing_part(f"determined.errors.{name}")))
