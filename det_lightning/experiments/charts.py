"""The charts of an experiment: the metric over batches, and over the hyperparameters that differ between its trials."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from det_lightning.experiments.hyperparameter_values import Hyperparameter
from det_lightning.experiments.state import ExperimentState, TrialRecord

# Determined's page shows the curves of this many trials, best first.
_MOST_CURVES = 100
_HEIGHT = 420
# Up to this many values of a hyperparameter get a row or column of the heat map each; more are put into as many ranges.
_MOST_CELLS = 10
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def learning_curves(state: ExperimentState, trials: Sequence[TrialRecord]) -> go.Figure:
    """Return the metric over batches, with a line for each trial, or for the first ones if there are many."""
    figure = go.Figure(layout={"height": _HEIGHT, "xaxis_title": "batches", "yaxis_title": state.metric})
    for trial in trials[:_MOST_CURVES]:
        steps = sorted(trial.validations)
        values = [state.metric_of(trial.validations[step]) for step in steps]
        figure.add_scatter(x=steps, y=values, mode="lines+markers", name=_name(trial), showlegend=True)
    return figure


def parallel_coordinates(
    state: ExperimentState, trials: Sequence[TrialRecord], hyperparameters: Sequence[Hyperparameter]
) -> go.Figure:
    """Return a line for each trial through its hyperparameters to its metric, which determines the colour.

    Plotly's own chart of this kind needs WebGL, which not every browser has.
    """
    metric = Hyperparameter(state.metric, {trial.trial_id: state.best_of(trial) for trial in trials})
    axes = [_Axis.of(values, trials) for values in (*hyperparameters, metric)]
    positions = axes[-1].positions
    colors = sample_colorscale(
        "Viridis", positions if state.smaller_is_better else [1 - position for position in positions]
    )
    figure = go.Figure(layout={"height": _HEIGHT, "showlegend": False, "hovermode": "closest"})
    # The best trials come last, above the others.
    for index, trial in reversed(list(enumerate(trials))):
        figure.add_scatter(
            x=list(range(len(axes))),
            y=[axis.positions[index] for axis in axes],
            text=[f"{axis.name}: {axis.values[index]}" for axis in axes],
            mode="lines+markers",
            line_color=colors[index],
            name=_name(trial),
            hovertemplate="%{text}",
        )
    for x, axis in enumerate(axes):
        figure.add_vline(x, line_color="#57606a", line_width=1)
        for position, text in axis.ticks.items():
            figure.add_annotation(
                x=x, y=position, text=html.escape(text), showarrow=False, xanchor="left", bgcolor="rgba(255,255,255,.7)"
            )
    names = [html.escape(axis.name) for axis in axes]
    figure.update_xaxes(tickvals=list(range(len(axes))), ticktext=names, side="top", showgrid=False, zeroline=False)
    figure.update_yaxes(visible=False, range=[-0.05, 1.05])
    return figure


def scatter(state: ExperimentState, trials: Sequence[TrialRecord], hyperparameter: Hyperparameter) -> go.Figure:
    """Return the metric over a hyperparameter, with a point for each trial."""
    axis: dict[str, Any] = {"title": hyperparameter.name}
    if not hyperparameter.is_number:
        axis |= {"type": "category", "categoryorder": "category ascending"}
    elif hyperparameter.is_log:
        axis["type"] = "log"
    figure = go.Figure(layout={"height": 300, "xaxis": axis, "yaxis_title": state.metric})
    metric = [state.best_of(trial) for trial in trials]
    figure.add_scatter(x=hyperparameter.of(trials), y=metric, text=list(map(_name, trials)), mode="markers")
    return figure


def heat_map(
    state: ExperimentState, trials: Sequence[TrialRecord], pairs: Sequence[tuple[Hyperparameter, Hyperparameter]]
) -> go.Figure:
    """Return the mean of the metric over pairs of hyperparameters, with a trace for each pair; the first is visible.

    Cells without a trial are empty.
    """
    layout = {"height": _HEIGHT, "showlegend": False, "plot_bgcolor": "#f3f4f6", **pair_layout(*pairs[0])}
    figure = go.Figure(layout=layout)
    for index, (first, second) in enumerate(pairs):
        columns, column_of = _cells(first, trials)
        rows, row_of = _cells(second, trials)
        members: list[list[list[TrialRecord]]] = [[[] for _ in columns] for _ in rows]
        for trial in trials:
            members[row_of[trial.trial_id]][column_of[trial.trial_id]].append(trial)
        figure.add_heatmap(
            x=columns,
            y=rows,
            z=[[_mean(state, cell) for cell in row] for row in members],
            text=[[", ".join(map(_name, cell)) for cell in row] for row in members],
            hovertemplate="%{x}, %{y}: %{z}<br>%{text}<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            visible=index == 0,
            colorbar={"title": state.metric},
            colorscale="Viridis",
            reversescale=not state.smaller_is_better,  # the best values are dark
        )
    return figure


def pair_layout(first: Hyperparameter, second: Hyperparameter) -> dict[str, Any]:
    """Return the part of a heat map's layout that depends on the pair of hyperparameters."""
    return {
        axis: {"title": {"text": hyperparameter.name}, "type": "category"}
        for axis, hyperparameter in (("xaxis", first), ("yaxis", second))
    }


def _name(trial: TrialRecord) -> str:
    return f"Trial {trial.trial_id}"


def _texts(values: Sequence[float]) -> list[str]:
    """Return distinct numbers as text, with at least three digits and enough to tell them apart."""
    texts: list[str] = []
    for digits in range(3, 18):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(values):
            break
    return texts


class _Axis(NamedTuple):
    """An axis of the parallel coordinates: the position of each trial, from 0 to 1, and the tick labels."""

    name: str
    values: list[Any]
    positions: list[float]
    ticks: dict[float, str]

    @classmethod
    def of(cls, hyperparameter: Hyperparameter, trials: Sequence[TrialRecord]) -> _Axis:
        values = hyperparameter.of(trials)
        if not hyperparameter.is_number:
            texts = sorted(set(values))
            position_of = {text: index / max(len(texts) - 1, 1) for index, text in enumerate(texts)}
            ticks = {position: text for text, position in position_of.items()}
            return cls(hyperparameter.name, values, [position_of[value] for value in values], ticks)
        scaled = [hyperparameter.scaled(value) for value in values]
        least = min(scaled)
        extent = max(scaled) - least
        positions = [(value - least) / extent if extent else 0.0 for value in scaled]
        marked = _TICKS if extent else (0.0,)
        texts = _texts([hyperparameter.unscaled(least + extent * position) for position in marked])
        return cls(hyperparameter.name, values, positions, dict(zip(marked, texts, strict=True)))


def _cells(hyperparameter: Hyperparameter, trials: Sequence[TrialRecord]) -> tuple[list[str], dict[int, int]]:
    """Return the labels of the rows or columns of a hyperparameter, and the index that each trial belongs to."""
    values = hyperparameter.of(trials)
    distinct = sorted(set(values))
    if not hyperparameter.is_number or len(distinct) <= _MOST_CELLS:
        labels = [str(value) for value in distinct]
        positions = [distinct.index(value) for value in values]
    else:
        least = hyperparameter.scaled(distinct[0])
        width = (hyperparameter.scaled(distinct[-1]) - least) / _MOST_CELLS
        edges = _texts([hyperparameter.unscaled(least + width * index) for index in range(_MOST_CELLS + 1)])
        labels = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
        positions = [min(int((hyperparameter.scaled(value) - least) / width), _MOST_CELLS - 1) for value in values]
    return labels, {trial.trial_id: position for trial, position in zip(trials, positions, strict=True)}


def _mean(state: ExperimentState, trials: Sequence[TrialRecord]) -> float | None:
    known = [value for trial in trials if (value := state.best_of(trial)) is not None]
    return sum(known) / len(known) if known else None
