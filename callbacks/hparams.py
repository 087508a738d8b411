"""The hyperparameters of an experiment's trial, for TensorBoard's HParams tab."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.plugins.hparams import summary_v2

from det_lightning.adapters.lightning_package import pl
from det_lightning.core._task import TrialTask
from det_lightning.core._tensorboard import TensorBoardOutput, make_validation_tag


class HParamsSummary(pl.Callback):
    """Writes a trial's hyperparameters and the experiment's search space to the trial's TensorBoard files.

    In the directory above several trials, TensorBoard compares the trials by the searcher's metric.
    """

    def __init__(self, output: TensorBoardOutput, task: TrialTask) -> None:
        self._output = output
        self._task = task

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the hyperparameters and the search space on the chief: a trial may be the only one in its directory."""
        if not self._output.enabled or not trainer.is_global_zero:
            return
        task = self._task
        parameters = list(_parameters(task.config["hyperparameters"], task.hparams))
        metric = task.config["searcher"]["metric"]
        metrics = [summary_v2.Metric(make_validation_tag(metric), display_name=metric)] if metric else []
        search = summary_v2.hparams_config_pb([parameter for parameter, _ in parameters], metrics)
        values = {parameter.name: value for parameter, value in parameters}
        self._output.add_summary(search)
        self._output.add_summary(summary_v2.hparams_pb(values, trial_id=f"trial {task.trial_id}"))


def _parameters(
    space: Mapping[str, Any], hparams: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[summary_v2.HParam, Any]]:
    """Yield each hyperparameter and its value as TensorBoard stores it; nested ones have dotted names."""
    for name, entry in space.items():
        value = hparams[name]
        if "type" not in entry:
            yield from _parameters(entry, value, f"{prefix}{name}.")
        else:
            domain = _domain(entry, value)
            yield summary_v2.HParam(f"{prefix}{name}", domain), domain.dtype(value)


def _domain(entry: Mapping[str, Any], value: Any) -> summary_v2.Domain:
    kind = entry["type"]
    if kind == "int":
        return summary_v2.IntInterval(entry["minval"], entry["maxval"])
    if kind == "double":
        return summary_v2.RealInterval(float(entry["minval"]), float(entry["maxval"]))
    if kind == "log":
        return summary_v2.RealInterval(*sorted(float(entry["base"]) ** entry[end] for end in ("minval", "maxval")))
    values = entry["vals"] if kind == "categorical" else [value]
    dtype = _common_type(values)
    return summary_v2.Discrete({dtype(value) for value in values}, dtype)


def _common_type(values: list[Any]) -> type:
    if all(isinstance(value, bool) for value in values):
        return bool
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return float
    return str
