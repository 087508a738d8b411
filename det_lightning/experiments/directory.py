"""The directory of an experiment: paths, configuration, options, and finding experiments."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from det_lightning import errors
from det_lightning.core._task import NODES
from det_lightning.escaping import name_some
from det_lightning.files.local_files import write_private
from det_lightning.files.strict_json import MAX_SMALL_FILE_BYTES, is_shallow, to_json

_NUMBER = re.compile(r".*-(\d+)")


class Options(BaseModel):
    """The options of ``run`` and ``resume``, kept for the next ``resume``."""

    model_config = ConfigDict(strict=True, frozen=True)

    loggers: list[str]
    #: The first checkpoint of all trials, found when the experiment began.
    source_checkpoint: str | None = None
    #: Whether trials may unpickle objects in checkpoints, which runs any code in the files.
    trusted: bool = False
    #: Replaces ``resources.slots_per_trial``.
    slots: PositiveInt | None = None
    cpu: bool = False
    #: The address of a Ray cluster, or None for this machine.
    ray: str | None = None
    #: Whether one trial only shows that the code runs.
    tries: bool = False


class ExperimentDirectory:
    """The paths of the parts of an experiment."""

    def __init__(self, path: Path) -> None:
        # Absolute, because the processes of trials have other working directories.
        path = path.absolute()
        self.path = path
        self.given_config = path / "experiment.yaml"
        self.config_file = path / "config.json"
        self.code = path / "code"
        self.options_file = path / "options.json"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.best = path / "trials" / "best.json"

    @property
    def experiment_id(self) -> int:
        """The number at the end of the directory's name, or 1."""
        match = _NUMBER.fullmatch(self.path.name)
        return int(match.group(1)) if match else 1

    @classmethod
    def create(cls, parent: Path, name: str) -> ExperimentDirectory:
        """Create the directory of a new experiment, ``NAME-NUMBER``."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            advice = "--experiments names another directory for experiments"
            raise errors.ExperimentError(f"{parent.absolute()} cannot be created: {e.strerror}; {advice}.") from e
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60] or "experiment"
        taken = (_NUMBER.fullmatch(path.name) for path in parent.iterdir())
        number = max((int(match.group(1)) for match in taken if match), default=0)
        while True:
            number += 1
            path = parent / f"{slug}-{number}"
            try:
                path.mkdir(mode=0o700)  # a configuration may hold secrets
            except FileExistsError:  # created by another starting experiment
                continue
            return cls(path)

    @classmethod
    def existing(cls, path: Path) -> ExperimentDirectory:
        """Return the experiment in ``path``; otherwise raise an ExperimentError that names experiments nearby."""
        if not is_experiment(path):
            raise errors.ExperimentError(
                f"{path} is not an experiment; expected a directory with events.jsonl in it. {_name_near(path)}"
            )
        return cls(path)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The configuration with all defaults, from the beginning of the experiment."""
        config = _read_json(self.config_file)
        if not _is_configuration(config):
            raise errors.DamagedExperiment(
                f"{self.config_file} is not the configuration of an experiment: there must be a 'name', "
                "'hyperparameters', a 'checkpoint_storage', and a 'searcher' with 'metric' and 'smaller_is_better'."
            )
        return config

    def options(self) -> Options:
        """Return the options of the last ``run`` or ``resume``."""
        # Releases without the file, or the entry, started from the checkpoint in the configuration.
        source = self.config["searcher"].get("source_checkpoint_uuid")
        given = _read_json(self.options_file) if self.options_file.exists() else {"loggers": []}
        try:
            return Options.model_validate({"source_checkpoint": source, **given} if isinstance(given, dict) else given)
        except ValidationError as e:
            wrong = ", ".join(repr(error["loc"][0]) for error in e.errors() if error["loc"])
            raise errors.DamagedExperiment(
                f"{self.options_file} must hold the options of a run; these are wrong: {wrong or 'all'}."
            ) from e

    def write_options(self, options: Options) -> None:
        write_private(self.options_file, to_json(options.model_dump()))

    def checkpoint_storage(self) -> str | dict[str, Any]:
        """Return the storage of the trials: a section of the configuration, or a path in the experiment's directory.

        A relative path in the section is relative to the experiment's directory. A smoke run does not use the section.
        """
        named = None if self.options().tries else read_storage(self.config)
        if named is None:
            return str(self.checkpoints)
        if named["type"] == "directory":  # a trial's working directory is deleted when the trial is started again
            named["container_path"] = str(self.path / named["container_path"])
        return named

    def files_with_settings(self) -> list[Path]:
        """Return the files with the given configuration or hyperparameters, secrets included."""
        tasks = sorted([*self.path.glob("trials/*/task.json"), *self.path.glob(f"trials/*/{NODES}/*/task.json")])
        return [self.given_config, self.config_file, self.options_file, self.events, *tasks]

    def trial(self, trial_id: int) -> Path:
        return self.path / "trials" / str(trial_id)


def _read_json(path: Path) -> Any:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for a writer
            raise ValueError("it is not a file")
        if status.st_size > MAX_SMALL_FILE_BYTES:
            raise ValueError(f"it has {status.st_size:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise errors.DamagedExperiment(f"{path} is not JSON: {e}") from e


def _is_configuration(value: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(value, dict) or not is_shallow(value):
        return False
    searcher = value.get("searcher")
    return (
        isinstance(value.get("name"), str)
        and isinstance(value.get("hyperparameters"), dict | None)
        and isinstance(value.get("checkpoint_storage"), dict | None)
        and isinstance(searcher, dict)
        and isinstance(searcher.get("metric"), str | None)
        and "smaller_is_better" in searcher
    )


def read_storage(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the storage in a configuration, without retention rules, or None."""
    section = config.get("checkpoint_storage") or {}
    if section.get("type") is None:
        return None
    return {name: value for name, value in section.items() if value is not None and not name.startswith("save_")}


def find_experiments(parent: Path) -> list[ExperimentDirectory]:
    """Return the experiments in a directory, by number."""
    # Unreadable directories are left out; Path.is_file() would be an error there.
    readable = (path for path in parent.glob("*-*") if os.access(path / "events.jsonl", os.R_OK))
    found = [ExperimentDirectory(path) for path in readable if (path / "events.jsonl").is_file()]
    return sorted(found, key=lambda directory: directory.experiment_id)


def _name_near(path: Path) -> str:
    """Return a hint at experiments with a similar path, or with the path as their number."""
    parents = [path, path.parent, path.parent / "experiments"]
    found = {one.path.name: one for parent in parents if parent.is_dir() for one in find_experiments(parent)}
    if not found:
        return "`det-lightning experiment ls --experiments DIR` lists the experiments in a directory."
    numbered = [name for name, one in found.items() if path.name == str(one.experiment_id)]
    meant = numbered or difflib.get_close_matches(path.name, found) or [*found]
    return f"Name an experiment by its directory, such as {name_some([str(found[name].path) for name in meant])}."


def is_experiment(path: Path) -> bool:
    """Return whether a directory holds an experiment."""
    directory = ExperimentDirectory(path)
    return directory.events.is_file() and directory.config_file.is_file()
