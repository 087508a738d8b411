"""An experiment as one HTML page: learning curves, the metric over the hyperparameters, and a table of trials.

The page needs no network, because it includes plotly's library.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_lightning import errors
from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.hyperparameter_values import Hyperparameter, varying_hyperparameters
from det_lightning.experiments.overview import details_of, format_number, state_of
from det_lightning.experiments.state import ExperimentState, TrialRecord
from det_lightning.extras import how_to_install
from det_lightning.hyperparameters import flatten

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
.number {{ text-align: right; font-variant-numeric: tabular-nums }}
.wide {{ overflow-x: auto }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)) }}
.grid > * {{ min-width: 0 }}
select {{ font: inherit; max-width: 100% }}
</style>
<script>{library}</script>
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
# Shows another pair of hyperparameters in the heat map. Plotly's own menus cannot be used with the keyboard.
_CHOOSE_PAIR = """
document.getElementById("pair").addEventListener("change", (event) => {
  const chosen = Number(event.target.value);
  const layouts = %s;
  Plotly.update("{plot_id}", {visible: layouts.map((_, index) => index === chosen)}, layouts[chosen]);
});
"""
_NUMBERS = ("id", "batches", "best", "latest", "restarts")
_COLUMNS = ("id", "state", "batches", "best", "latest", "restarts", "checkpoint", "hparams", "reason")


def write_report(directory: ExperimentDirectory, file: Path) -> None:
    """Write the page of an experiment; raise an ExperimentError if plotly is not installed (extra ``report``)."""
    try:
        import plotly.offline
    except ModuleNotFoundError as error:
        raise errors.ExperimentError(f"The page needs plotly: {how_to_install('report')}.") from error

    state = state_of(directory)
    details = details_of(directory)
    sections = [f"<section><h2>{heading}</h2>{content}</section>" for heading, content in _charts(directory, state)]
    sections.append(f"<section><h2>Trials</h2>{_table(details['trials'])}</section>")
    best = f", best {format_number(details['best'])}" if details["best"] is not None else ""
    file.write_text(
        _PAGE.format(
            title=html.escape(f"{details['name']} ({details['state']})"),
            summary=html.escape(
                f"{details['metric']}; {len(state.trials)} trials{best}; started {details['started']}."
            ),
            sections="\n".join(sections),
            library=plotly.offline.get_plotlyjs(),
        ),
        encoding="utf-8",
    )


def _charts(directory: ExperimentDirectory, state: ExperimentState) -> Iterator[tuple[str, str]]:
    """Yield the heading and HTML of each chart that has something to show."""
    from det_lightning.experiments import charts

    trials = _ranked(state)
    if not trials:
        return
    yield "Learning curves", _html(charts.learning_curves(state, trials))
    varying = varying_hyperparameters(directory.config(), state)
    if not varying:
        return
    if len(trials) > 1:
        yield "Parallel coordinates", _html(charts.parallel_coordinates(state, trials, varying))
    points = "".join(_html(charts.scatter(state, trials, hyperparameter)) for hyperparameter in varying)
    yield "Hyperparameters and metric", f'<div class="grid">{points}</div>'
    pairs = list(itertools.combinations(varying, 2))
    if pairs:
        layouts = json.dumps([charts.pair_layout(*pair) for pair in pairs]).replace("<", "\\u003c")
        chart = _html(charts.heat_map(state, trials, pairs), after=_CHOOSE_PAIR % layouts)
        yield "Pairs of hyperparameters", f"{_menu(pairs)}{chart}"


def _html(figure: Any, after: str | None = None) -> str:
    """Return a figure as HTML; ``after`` is a script to run once it is drawn."""
    import plotly.io

    figure.update_layout(template="plotly_white", margin={"t": 30})
    options = {"displaylogo": False, "responsive": True}
    text: str = plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=options, post_script=after)
    return text


def _menu(pairs: Sequence[tuple[Hyperparameter, Hyperparameter]]) -> str:
    names = (html.escape(f"{first.name} and {second.name}") for first, second in pairs)
    options = "".join(f'<option value="{index}">{name}</option>' for index, name in enumerate(names))
    # Without autocomplete="off", a reloaded page may show the first pair's chart under the name of another pair.
    return f'<p><label>Pair <select id="pair" autocomplete="off">{options}</select></label></p>'


def _ranked(state: ExperimentState) -> list[TrialRecord]:
    """Return the trials with a metric that can be drawn, best first."""
    best = {trial.trial_id: state.best_of(trial) for trial in state.trials.values()}
    finite = {trial_id: value for trial_id, value in best.items() if value is not None and math.isfinite(value)}
    ranked = sorted(finite, key=finite.__getitem__, reverse=not state.smaller_is_better)
    return [state.trials[trial_id] for trial_id in ranked]


def _table(trials: list[dict[str, Any]]) -> str:
    head = "".join(f'<th scope="col"{_kind(name)}>{name}</th>' for name in _COLUMNS)
    rows = "".join(f"<tr>{''.join(_cell(name, trial[name]) for name in _COLUMNS)}</tr>" for trial in trials)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{name}={entry}" for name, entry in flatten(value).items())
    elif isinstance(value, float):
        value = format_number(value)
    return f"<td{_kind(name)}>{html.escape('' if value is None else str(value))}</td>"


def _kind(column: str) -> str:
    return ' class="number"' if column in _NUMBERS else ""
