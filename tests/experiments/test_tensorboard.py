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


def read_hparams_tab(directory: Path) -> tuple[list[Any], list[str], dict[str, tuple[dict[str, Any], float]]]:
    """Return what TensorBoard's tab HParams shows: the hyperparameters, the metrics, and the values by trial."""
    runs = EventMultiplexer()
    runs.AddRunsFromDirectory(str(directory))
    runs.Reload()
    context = backend_context.Context(TBContext(data_provider=MultiplexerDataProvider(runs, str(directory))))
    experiment = get_experiment.Handler(RequestContext(), context, "", api_pb2.GetExperimentRequest()).run()
    metrics = [metric.name.tag for metric in experiment.metric_infos]
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING],
        col_params=[api_pb2.ColParams(metric={"tag": metrics[0]}, order=api_pb2.ORDER_ASC)],
        slice_size=100,
    )
    rows = {}
    for group in list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups:
        hparams = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
        rows[group.name] = (hparams, group.metric_values[0].value)
    return list(experiment.hparam_infos), metrics, rows


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
    infos, metrics, rows = read_hparams_tab(experiment / "trials")
    by_name = {info.name: info for info in infos}
    assert list(by_name) == ["api_key", "global_batch_size", "lr", "model.bias", "model.kind"]
    domain = by_name["lr"].domain_interval
    assert (domain.min_value, domain.max_value) == pytest.approx((0.001, 0.1))
    assert metrics == ["Determined/validation_loss"]
    created = {f"trial {event['trial']}": event["hparams"] for event in events_of(experiment, "trial_created")}
    validations = events_of(experiment, "validation")
    latest = {f"trial {event['trial']}": event["metrics"]["validation_loss"] for event in validations}
    assert set(rows) == set(created) == {"trial 1", "trial 2"}
    for name, (hparams, metric) in rows.items():
        drawn = {"lr": created[name]["lr"], "model.kind": str(created[name]["model"]["kind"])}
        assert hparams == {"api_key": "hidden", "global_batch_size": 8.0, "model.bias": True, **drawn}
        assert metric == pytest.approx(latest[name])
