"""``ExperimentConfig``: the whole configuration; also ``optimizations``, ``profiling``, ``reproducibility``, logs.

Change here: a new field of a configuration; ``det_lightning/config/effects.py`` says what the field does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from det_lightning.config.document import KeyPath, SourceLines
from det_lightning.config.environment import BindMount, Environment, Pbs, Resources, Slurm
from det_lightning.config.hyperparameters import Hyperparameters, list_doubts
from det_lightning.config.length import Length, Period
from det_lightning.config.searchers import AnySearcher, HalvingSearcher, SingleSearcher
from det_lightning.config.section import UNTYPED, Count, Integer, Positive, Section, refuse, show_value
from det_lightning.config.storage import AnyStorage, StorageConfig
from det_lightning.errors import ConfigMistake
from det_lightning.importing import split_spec
from det_lightning.masking import mask_config

# Python would read these otherwise, as a set of characters.
_NAMED_CLASS = re.compile(r"\[:\^?\w+:\]")
_TRIAL_CLASS = re.compile(r"[\w.]+:[\w.]+|[\w./]+\.py:[\w.]+")
_LAUNCHED_TRIAL = re.compile(r"(?:^|\s)--trial[\s=]+([\w.]+:[\w.]+)")
_LAUNCHER = re.compile(r"\bdet(?:ermined|_lightning)\.launch\.")
_HARNESS = re.compile(r"-m\s+det(?:ermined|_lightning)\.(?:exec\.harness|launch\.autohorovod)\s+([\w.]+:[\w.]+)")


def _entrypoint(value: Any) -> Any:
    is_command = isinstance(value, list) and value and all(isinstance(part, str) for part in value)
    if not is_command and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"must be module:Class, a command, or a list of a command's parts; got {show_value(value)}")
    # A block scalar of YAML ends with a line break, allowed by Determined after a class.
    is_class = isinstance(value, str) and _TRIAL_CLASS.fullmatch(value.strip())
    return ":".join(split_spec(value)) if is_class else value


class Optimizations(Section):
    """How gradients are aggregated and all-reduced."""

    aggregation_frequency: Positive = 1
    average_aggregated_gradients: bool = True
    average_training_metrics: bool = True
    gradient_compression: bool = False
    mixed_precision: Literal["O0", "O1", "O2", "O3"] = "O0"
    tensor_fusion_threshold: Count = 64
    tensor_fusion_cycle_time: Count = 1
    auto_tune_tensor_fusion: bool = False
    grad_updates_size_file: str | None = None


class Profiling(Section):
    """Whether the trial is profiled."""

    enabled: bool = False
    begin_on_batch: Count = 0
    end_after_batch: Count | None = None
    sync_timings: bool = True

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Profiling:
        if self.end_after_batch is not None and self.end_after_batch < self.begin_on_batch:
            message = f"must be at least begin_on_batch, {self.begin_on_batch}; got {self.end_after_batch}"
            refuse(("end_after_batch",), message)
        return self


class Reproducibility(Section):
    """The seed of all random numbers. Defaults to the time of reading."""

    experiment_seed: Annotated[Integer, Field(ge=0, lt=2**32)] = Field(default_factory=lambda: int(time.time()))


def compile_log_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern written for Go; raise an ``re.error`` for syntax that Python lacks."""
    if (found := _NAMED_CLASS.search(pattern)) is not None:
        raise re.error(f"{found[0]} is syntax of Go only: write the characters, such as A-Za-z for [:alpha:]")
    return re.compile(pattern)


def _pattern(pattern: str) -> str:
    try:
        compile_log_pattern(pattern)
    except (re.error, OverflowError, RecursionError) as e:  # the last two for numbers and nesting beyond the limits
        raise ValueError(f"is not a regular expression that Python can read: {e}; got {show_value(pattern)}") from e
    return pattern


def _read_action(value: Any) -> Any:
    return value["type"] if isinstance(value, dict) and set(value) == {"type"} else value


class LogPolicy(Section):
    """What happens once a line of a trial's log matches a pattern."""

    name: str | None = None
    pattern: Annotated[str, AfterValidator(_pattern)] | None = None
    action: Annotated[Literal["cancel_retries", "exclude_node"] | None, BeforeValidator(_read_action)] = None


class RetentionPolicy(Section):
    """How long the platform keeps logs."""

    log_retention_days: Annotated[Integer, Field(ge=-1, le=32767)] | None = None


_DEFAULT_LOG_POLICIES = [
    LogPolicy(name="CUDA OOM", pattern=".*CUDA out of memory.*"),
    LogPolicy(name="ECC Error", pattern=".*uncorrectable ECC error encountered.*"),
]


class ExperimentConfig(Section):
    """A Determined experiment configuration, including all defaults.

    Created by :func:`~det_lightning.config.read_config`, after checks across sections.
    """

    name: str = "experiment"
    description: str | None = None
    labels: list[str] = []
    workspace: str = ""
    project: str = ""
    entrypoint: Annotated[str | list[str] | None, BeforeValidator(_entrypoint)] = None
    data: Annotated[dict[str, Any], UNTYPED] = {}
    hyperparameters: Hyperparameters = Field(default_factory=dict)
    searcher: AnySearcher = SingleSearcher()
    max_restarts: Count = 5
    scheduling_unit: Positive = 100
    records_per_epoch: Count = 0
    min_validation_period: Period = Length(0, "batches")
    min_checkpoint_period: Period = Length(0, "batches")
    perform_initial_validation: bool = False
    checkpoint_policy: Literal["best", "all", "none"] = "best"
    checkpoint_storage: AnyStorage = StorageConfig()
    optimizations: Optimizations = Optimizations()
    reproducibility: Reproducibility = Field(default_factory=Reproducibility)
    resources: Resources = Resources()
    environment: Environment = Environment()
    bind_mounts: list[BindMount] = []
    profiling: Profiling = Profiling()
    debug: bool = False
    log_policies: list[LogPolicy] = _DEFAULT_LOG_POLICIES
    retention_policy: RetentionPolicy = RetentionPolicy()
    preemption_timeout: Count | None = None
    slurm: Slurm = Slurm()
    pbs: Pbs = Pbs()
    integrations: dict[str, Any] | None = None
    tensorboard_storage: dict[str, Any] | None = None
    security: dict[str, Any] | None = None
    data_layer: dict[str, Any] | None = None
    internal: dict[str, Any] | None = None

    _lines: SourceLines = PrivateAttr(default_factory=SourceLines)
    _notes: tuple[ConfigMistake, ...] = PrivateAttr(default=())
    _unknown: tuple[ConfigMistake, ...] = PrivateAttr(default=())

    def model_post_init(self, context: Any, /) -> None:
        if context is not None:
            document = context["document"]
            self._lines = document.lines
            self._notes = tuple(document.notes)
            self._unknown = tuple(document.unknown)

    @property
    def notes(self) -> tuple[ConfigMistake, ...]:
        """Values read differently than written, and probable mistakes, in the order of the file."""
        doubts = [*self.searcher.doubts(), *self._doubts_about_validations()]
        located = [self._lines.mistake(("searcher", name), message) for name, message in doubts]
        located += [self._lines.mistake(path, message) for path, message in list_doubts(self.hyperparameters)]
        return tuple(sorted([*self._notes, *located], key=ConfigMistake.position))

    @property
    def unknown_keys(self) -> tuple[ConfigMistake, ...]:
        """Keys unknown to every release; allowed only in a configuration given to a call."""
        return tuple(sorted(self._unknown, key=ConfigMistake.position))

    def _doubts_about_validations(self) -> Iterator[tuple[str, str]]:
        waits = isinstance(self.searcher, HalvingSearcher) and not self.searcher.validates_at_rungs
        if waits and self.trial_class is not None and self.min_validation_period.units == 0:
            yield (
                "max_time",
                "no trial is stopped early: without min_validation_period a trial validates at the end only",
            )

    def mistake(self, path: KeyPath, message: str) -> ConfigMistake:
        """Return a mistake in the value at ``path``, with the line."""
        return self._lines.mistake(path, message)

    def find_line(self, path: KeyPath) -> int | None:
        """Return the line of a key in the file, or None for a key from elsewhere."""
        return self._lines.find(path)

    @property
    def trial_class(self) -> str | None:
        """The trial as ``module:Class``, if Determined's training loop runs one, also through ``--trial``."""
        command = self.entrypoint if isinstance(self.entrypoint, str) else " ".join(self.entrypoint or [])
        if _TRIAL_CLASS.fullmatch(command):
            return command
        found = _HARNESS.search(command) or (_LAUNCHER.search(command) and _LAUNCHED_TRIAL.search(command))
        return ":".join(split_spec(found[1])) if found else None

    def as_dict(self, *, masked: bool = False) -> dict[str, Any]:
        """Return the configuration with all defaults, as trials get it; ``masked`` hides secrets for display."""
        plain = self.model_dump()
        displayed: dict[str, Any] = mask_config(plain) if masked else plain
        return displayed
