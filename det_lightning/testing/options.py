"""The options of ``pytest --trial``, read into ``TrialOptions``, with all mistakes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from det_lightning.errors import ConfigError
from det_lightning.files.file_kinds import require_output
from det_lightning.hyperparameters import choose_hparams
from det_lightning.missing_parts import how_to_install
from det_lightning.testing.checks import BadTrial
from det_lightning.testing.records.record import RecordError, read_record

#: With fewer, there is no room for the end of an epoch, a validation and a batch between them.
MIN_BATCHES = 6
_NEED_A_TRIAL = ("config", "hparams", "kwargs", "reference", "checkpoint", "metrics", "report")


@dataclasses.dataclass(frozen=True)
class TrialOptions:
    """The trial to check, and the settings of the checks."""

    spec: str  # "module:Class" or "path/to/file.py:Class"
    directory: Path  # the directory of the module; paths are relative to it
    hparams: dict[str, Any] | None = None
    config: dict[str, Any] | None = None  # the experiment configuration
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the constructor, besides the context
    batches: int = 12  # number of batches of each run
    seed: int = 0
    tolerance: float | None = None  # relative, for numbers of the reference; None for one that fits both environments
    reference: Path | None = None  # a record of the real determined
    checkpoint: str | None = None  # an old checkpoint
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # validation metrics of that checkpoint
    report: Path | None = None  # the file to write the HTML report to
    quick: bool = False  # without the checks that start other processes

    def get_section(self, section: str) -> dict[str, Any]:
        return (self.config or {}).get(section) or {}


def trial_options(values: Any, directory: Path) -> TrialOptions | None:
    """Return the options in ``pytest.Config.option``; None without a trial. A BadTrial names all mistakes."""
    mistakes: list[str] = []

    def attempt(read: Any, *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except (BadTrial, ValueError, OSError) as e:
            mistakes.append(str(e))
        return None

    options = {name.removeprefix("trial_"): value for name, value in vars(values).items() if name.startswith("trial_")}
    paths = {name: directory / options[name] for name in ("reference", "report") if options[name]}
    if (spec := values.trial) is None:
        if unused := ", ".join(f"--trial-{name}" for name in _NEED_A_TRIAL if options[name]):
            raise BadTrial(f"{unused} needs a trial; add --trial module:Class.")
        return None
    config = attempt(read_config, directory / values.trial_config) if values.trial_config else None
    if not all(spec.rpartition(":")[::2]):
        mistakes.append(f"--trial must be module:Class, such as model_def:MyTrial; got {spec!r}.")
    hparams = attempt(_parse_object, "--trial-hparams", values.trial_hparams, '{"lr": 0.1}')
    if config is not None:
        hparams = {**(attempt(choose_hparams, config) or {}), **(hparams or {})}
    arguments = attempt(_parse_object, "--trial-kwargs", values.trial_kwargs, '{"depth": 18}')
    if "report" in paths:
        attempt(require_output, paths["report"], (".html",))
        if not all(map(importlib.util.find_spec, ("jinja2", "plotly"))):
            mistakes.append(f"--trial-report needs jinja2 and plotly: {how_to_install('testing')}.")
    metrics = attempt(_parse_object, "--trial-metrics", values.trial_metrics, '{"validation_loss": 0.25}') or {}
    if wrong := {name: value for name, value in metrics.items() if not isinstance(value, int | float)}:
        mistakes.append(f"--trial-metrics must be numbers; got {wrong}.")
    if values.trial_batches < MIN_BATCHES:
        mistakes.append(f"--trial-batches must be at least {MIN_BATCHES}; got {values.trial_batches}.")
    if mistakes:
        raise BadTrial("\n".join(mistakes))
    if "reference" in paths and config is None and hparams is None:
        with contextlib.suppress(RecordError):  # a check reports the error
            settings = read_record(paths["reference"]).settings
            hparams = dict(settings.hparams)
            config = settings.config
    seed = int(((config or {}).get("reproducibility") or {}).get("experiment_seed") or 0)
    given_as_is = {name: options[name] for name in ("batches", "tolerance", "checkpoint", "quick")}
    chosen = {"hparams": hparams, "config": config, "arguments": arguments or {}, "metrics": metrics, "seed": seed}
    return TrialOptions(spec, directory, **chosen, **given_as_is, **paths)


def _parse_object(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    message = f"{option} must be a JSON object, such as '{example}'; got {text!r}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise BadTrial(f"{message}: {e}.") from e
    if not isinstance(value, dict):
        raise BadTrial(f"{message}.")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Read an experiment configuration for calls; raises BadTrial for an unusable configuration."""
    from det_lightning.config import read_given

    try:
        return read_given(path).plain
    except ConfigError as e:
        raise BadTrial(f"--trial-config {e}") from None
