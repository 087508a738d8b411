"""TensorBoard on the directory of an experiment, read with TensorBoard itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

from tests.experiments.running import events_of
from tests.experiments.test_trial_classes import run_experiment

pytestmark = pytest.mark.slow


class HParamsTab:
    """What TensorBoard's tab HParams shows of a directory."""

    def __init__(self, directory: Path) -> None:
        runs = EventMultiplexer()
        runs.AddRunsFromDirectory(str(directory))
        runs.Reload()
        provider = MultiplexerDataProvider(runs, str(directory))
        self._context = backend_context.Context(TBContext(data_provider=provider))

    def columns(self) -> tuple[list[Any], list[str]]:
        """Return the hyperparameters, and the names of the metrics."""
        request = api_pb2.GetExperimentRequest()
        experiment = get_experiment.Handler(RequestContext(), self._context, "", request).run()
        return list(experiment.hparam_infos), [metric.name.tag for metric in experiment.metric_infos]

    def rows(self) -> dict[str, tuple[dict[str, Any], float]]:
        """Return the hyperparameters and the metric of each trial, by its name."""
        _, (metric,) = self.columns()
        request = api_pb2.ListSessionGroupsRequest(
            allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING],
            col_params=[api_pb2.ColParams(metric={"tag": metric}, order=api_pb2.ORDER_ASC)],
            slice_size=100,
        )
        found = list_session_groups.Handler(RequestContext(), self._context, "", request).run().session_groups
        return {
            group.name: (
                {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()},
                group.metric_values[0].value,
            )
            for group in found
        }


def test_hparams_tab_shows_all_trials(tmp_path: Path) -> None:
    experiment = run_experiment(
        tmp_path,
        hyperparameters={
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
            "global_batch_size": 8,
            "model": {"kind": {"type": "categorical", "vals": ["a", 2]}, "bias": True},
            "api_key": "hidden",
        },
        searcher={"name": "random", "metric": "validation_loss", "max_trials": 2, "max_length": {"batches": 5}},
    )
    tab = HParamsTab(experiment / "trials")
    infos, metrics = tab.columns()
    by_name = {info.name: info for info in infos}
    assert list(by_name) == ["api_key", "global_batch_size", "lr", "model.bias", "model.kind"]
    domain = by_name["lr"].domain_interval
    assert (domain.min_value, domain.max_value) == pytest.approx((0.001, 0.1))
    assert metrics == ["Determined/validation_loss"]
    rows = tab.rows()
    created = {f"trial {event['trial']}": event["hparams"] for event in events_of(experiment, "trial_created")}
    validations = events_of(experiment, "validation")
    latest = {f"trial {event['trial']}": event["metrics"]["validation_loss"] for event in validations}
    assert set(rows) == set(created) == {"trial 1", "trial 2"}
    for name, (hparams, metric) in rows.items():
        drawn = {"lr": created[name]["lr"], "model.kind": str(created[name]["model"]["kind"])}
        assert hparams == {"api_key": "hidden", "global_batch_size": 8.0, "model.bias": True, **drawn}
        assert metric == pytest.approx(latest[name])
