"""An experiment as one HTML page: learning curves, the hyperparameters against the metric, and a table of trials.

The page needs no network: plotly's library is in it.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.overview import details_of, state_of
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.extras import how_to_install
from det_lightning.masking import mask

# Determined's page shows the curves of so many trials, the best ones.
_MOST_CURVES = 100
_HEIGHT = 420
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff }}
body {{ max-width: 75rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; font-size: .9rem }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #d0d7de; text-align: left; vertical-align: top }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
.wide {{ overflow-x: auto }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{summary}</p>
{sections}
</main>
</body>
</html>
"""


def write_report(directory: ExperimentDirectory, file: Path) -> None:
    """Write the page of an experiment.

    Raises:
        ExperimentError: plotly is not installed; the extra ``report`` has it.
        OSError: the file cannot be written.
    """
    try:
        import plotly.io
    except ModuleNotFoundError as error:
        raise errors.ExperimentError(f"The page needs plotly: {how_to_install('report')}.") from error

    state = state_of(directory)
    details = details_of(directory)
    hparams = {trial.trial_id: _flat(mask(trial.hparams)) for trial in state.trials.values()}
    varying = _varying(hparams)
    figures = {
        "Learning curves": _curves(state),
        "Parallel coordinates": _parallel(state, hparams, varying),
        "Hyperparameters and metric": _scatter(state, hparams, varying),
        "Pairs of hyperparameters": _heat_map(state, hparams, varying),
    }
    sections: list[str] = []
    library: bool = True
    for heading, figure in figures.items():
        if figure is None:
            continue
        figure.update_layout(template="plotly_white", margin={"t": 30})
        chart = plotly.io.to_html(figure, include_plotlyjs=library, full_html=False, config={"displaylogo": False})
        library = False
        sections.append(f'<section aria-label="{heading}"><h2>{heading}</h2>{chart}</section>')
    sections.append(f"<section><h2>Trials</h2>{_table(details['trials'])}</section>")
    title = html.escape(f"{details['name']} ({details['state']})")
    best = f", best {details['best']}" if details["best"] else ""
    summary = html.escape(f"{details['metric']}; {len(state.trials)} trials{best}; started {details['started']}.")
    file.write_text(_PAGE.format(title=title, summary=summary, sections="\n".join(sections)), encoding="utf-8")


def _flat(hparams: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested hyperparameters by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in hparams.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _varying(hparams: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the hyperparameters that differ between trials."""
    names = {name for values in hparams.values() for name in values}
    return sorted(name for name in names if len({repr(values.get(name)) for values in hparams.values()}) > 1)


def _ranked(state: ExperimentState) -> list[TrialRecord]:
    """Return the trials that have a metric, the best first."""
    best = {trial.trial_id: state.best_of(trial) for trial in state.trials.values()}
    sign = 1 if state.smaller_is_better else -1
    known = [trial for trial in state.trials.values() if best[trial.trial_id] is not None]
    return sorted(known, key=lambda trial: sign * (best[trial.trial_id] or 0.0))


def _curves(state: ExperimentState) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure(layout={"height": _HEIGHT, "xaxis_title": "batches", "yaxis_title": state.metric})
    for trial in _ranked(state)[:_MOST_CURVES]:
        points = [(steps, state.metric_of(trial.validations[steps])) for steps in sorted(trial.validations)]
        x = [steps for steps, _ in points]
        y = [value for _, value in points]
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines+markers", name=f"Trial {trial.trial_id}"))
    return figure


def _parallel(state: ExperimentState, hparams: Mapping[int, Mapping[str, Any]], varying: list[str]) -> Any | None:
    import plotly.graph_objects as go

    trials = _ranked(state)
    if not varying or len(trials) < 2:
        return None
    metric = [state.best_of(trial) for trial in trials]
    dimensions = [_dimension(name, [hparams[trial.trial_id].get(name) for trial in trials]) for name in varying]
    dimensions.append({"label": state.metric, "values": metric})
    line = {"color": metric, "colorscale": "Viridis", "showscale": True, "reversescale": not state.smaller_is_better}
    return go.Figure(go.Parcoords(line=line, dimensions=dimensions), layout={"height": _HEIGHT})


def _dimension(name: str, values: list[Any]) -> dict[str, Any]:
    """Return an axis; values that are not numbers become ticks."""
    if all(_is_number(value) for value in values):
        return {"label": name, "values": values}
    texts = sorted({str(value) for value in values})
    positions = [texts.index(str(value)) for value in values]
    return {"label": name, "values": positions, "tickvals": list(range(len(texts))), "ticktext": texts}


def _scatter(state: ExperimentState, hparams: Mapping[int, Mapping[str, Any]], varying: list[str]) -> Any | None:
    from plotly.subplots import make_subplots

    trials = _ranked(state)
    if not varying or not trials:
        return None
    columns = min(len(varying), 3)
    rows = -(-len(varying) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=varying, shared_yaxes=True)
    for index, name in enumerate(varying):
        row, column = divmod(index, columns)
        x = [hparams[trial.trial_id].get(name) for trial in trials]
        x = x if all(map(_is_number, x)) else list(map(str, x))
        y = [state.best_of(trial) for trial in trials]
        labels = [f"Trial {trial.trial_id}" for trial in trials]
        figure.add_scatter(x=x, y=y, text=labels, mode="markers", row=row + 1, col=column + 1)
    figure.update_yaxes(title_text=state.metric, col=1)
    figure.update_layout(height=rows * 300, showlegend=False)
    return figure


def _heat_map(state: ExperimentState, hparams: Mapping[int, Mapping[str, Any]], varying: list[str]) -> Any | None:
    """Return the metric over each pair of numeric hyperparameters, one pair at a time, chosen in a menu."""
    import plotly.graph_objects as go

    trials = _ranked(state)
    numeric = [name for name in varying if all(_is_number(hparams[trial.trial_id].get(name)) for trial in trials)]
    pairs = list(itertools.combinations(numeric, 2))
    if not pairs or not trials:
        return None
    metric = [state.best_of(trial) for trial in trials]
    figure = go.Figure(layout={"height": _HEIGHT, "showlegend": False})
    for index, (first, second) in enumerate(pairs):
        x = [hparams[trial.trial_id][first] for trial in trials]
        y = [hparams[trial.trial_id][second] for trial in trials]
        figure.add_trace(go.Histogram2d(x=x, y=y, z=metric, histfunc="avg", colorscale="Viridis", visible=index == 0))
    buttons = [
        {
            "label": f"{first} and {second}",
            "method": "update",
            "args": [
                {"visible": [other == index for other in range(len(pairs))]},
                {"xaxis.title.text": first, "yaxis.title.text": second},
            ],
        }
        for index, (first, second) in enumerate(pairs)
    ]
    figure.update_layout(
        updatemenus=[{"buttons": buttons}] if len(pairs) > 1 else [],
        xaxis_title=pairs[0][0],
        yaxis_title=pairs[0][1],
    )
    return figure


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _table(trials: list[dict[str, Any]]) -> str:
    headings = ("id", "state", "batches", "best", "latest", "restarts", "checkpoint", "hparams", "reason")
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    rows = "".join(f"<tr>{''.join(_cell(trial[heading]) for heading in headings)}</tr>" for trial in trials)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}={entry}" for name, entry in _flat(mask(value)).items())
    kind = ' class="number"' if _is_number(value) else ""
    return f"<td{kind}>{html.escape('' if value is None else str(value))}</td>"
