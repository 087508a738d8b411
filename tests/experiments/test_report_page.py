"""The page of an experiment in a real browser: its charts hold the data, fit the window, and reach for no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import LAPTOP, PHONE, Visit, chromium, needs_chromium
from tests.experiments.made_experiments import made_experiment

plotly = pytest.importorskip("plotly", reason="plotly is not installed; run tox -e browser")
report = pytest.importorskip("det_lightning.experiments.report")

pytestmark = needs_chromium

HEADINGS = ["Learning curves", "Parallel coordinates", "Hyperparameters and metric", "Pairs of hyperparameters"]
PAIRS = ["kind and layers", "kind and lr", "layers and lr"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    file = folder / "page.html"
    report.write_report(made_experiment(folder, trials=4), file)
    return file


def traces_below(visit: Visit, heading: str) -> list[list[dict[str, Any]]]:
    """Return what each chart below a heading shows, as plotly has it after drawing."""
    charts = visit.page.locator(f"section:has(h2:text-is('{heading}')) .plotly-graph-div")
    assert charts.count() > 0
    fields = "['x', 'y', 'z', 'text', 'name', 'visible']"
    pick = f"trace => Object.fromEntries({fields}.filter(key => key in trace).map(key => [key, trace[key]]))"
    found: list[list[dict[str, Any]]] = charts.evaluate_all(f"charts => charts.map(chart => chart.data.map({pick}))")
    return found


def test_the_page_makes_no_request_and_logs_nothing(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file)
    assert visit.page.locator(".main-svg").first.is_visible()
    assert visit.requests == [page_file.as_uri()]
    assert visit.complaints == []
    assert visit.page.locator("h2").all_text_contents() == [*HEADINGS, "Trials"]


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_nothing_is_wider_than_the_window(browser: Any, viewport: dict[str, int], page_file: Path) -> None:
    page = Visit(browser, page_file, viewport=viewport).page
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    # The table scrolls.
    for part in page.locator("main > *, .wide, select, .plotly-graph-div, .plotly-graph-div .main-svg").all():
        box = part.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_the_page_is_accessible(browser: Any, viewport: dict[str, int], page_file: Path) -> None:
    """All of axe's rules hold for all of the page, plotly's charts included."""
    assert Visit(browser, page_file, viewport=viewport).accessibility_violations() == []


def test_the_learning_curves_have_each_validation_of_each_trial(browser: Any, page_file: Path) -> None:
    ((*curves,),) = traces_below(Visit(browser, page_file), "Learning curves")
    assert [(curve["name"], curve["x"], curve["y"]) for curve in curves] == [
        (f"Trial {trial}", [10, 20], [trial / 10, trial / 20]) for trial in (1, 2, 3, 4)
    ]


def test_the_parallel_coordinates_have_a_line_for_each_trial_and_the_best_above_the_others(
    browser: Any, page_file: Path
) -> None:
    visit = Visit(browser, page_file, viewport=LAPTOP)
    ((*lines,),) = traces_below(visit, "Parallel coordinates")
    assert [line["name"] for line in lines] == ["Trial 4", "Trial 3", "Trial 2", "Trial 1"]
    assert lines[-1]["text"] == ["kind: b", "layers: 1", "lr: 0.1", "loss: 0.05"]
    # The learning rate is drawn by its logarithm; the positions are in the order of the axes.
    assert [line["y"][2] for line in lines] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    drawn = visit.page.locator("section:has(h2:text-is('Parallel coordinates')) path.js-line")
    assert [path.bounding_box()["width"] > 300 for path in drawn.all()] == [True] * 4


def test_there_is_a_scatter_chart_for_each_hyperparameter_that_differs(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file)
    charts = [(chart["x"], chart["y"]) for (chart,) in traces_below(visit, "Hyperparameters and metric")]
    losses = [0.05, 0.1, 0.15, 0.2]
    assert charts == [
        (["b", "a", "b", "a"], losses),
        ([1, 2, 3, 4], losses),
        (pytest.approx([0.1, 0.01, 0.001, 0.0001]), losses),
    ]
    axes = visit.page.locator(".grid .plotly-graph-div").evaluate_all("all => all.map(each => each.layout.xaxis)")
    assert [(axis["title"]["text"], axis["type"]) for axis in axes] == [
        ("kind", "category"),
        ("layers", "linear"),
        ("lr", "log"),
    ]


def test_the_heat_map_shows_the_pair_that_is_chosen_with_the_keyboard(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file, viewport=LAPTOP)
    menu = visit.page.get_by_label("Pair")
    assert menu.locator("option").all_text_contents() == PAIRS
    menu.focus()
    visit.page.keyboard.press("ArrowDown")
    visit.page.keyboard.press("ArrowDown")
    ((*maps,),) = traces_below(visit, "Pairs of hyperparameters")
    assert [each["visible"] for each in maps] == [False, False, True]
    assert maps[2]["x"] == ["1", "2", "3", "4"]
    # Cells without a trial are empty; the smallest learning rate is below.
    assert maps[2]["z"] == [
        [None, None, None, 0.2],
        [None, None, 0.15, None],
        [None, 0.1, None, None],
        [0.05, None, None, None],
    ]
    section = visit.page.locator("section:has(h2:text-is('Pairs of hyperparameters'))")
    assert section.locator(".xtitle").text_content(timeout=5000) == "layers"
    assert section.locator(".ytitle").text_content(timeout=5000) == "lr"


def test_many_values_of_a_hyperparameter_are_put_into_ranges_of_the_heat_map(browser: Any, tmp_path: Path) -> None:
    report.write_report(made_experiment(tmp_path, trials=20), tmp_path / "page.html")
    ((*maps,),) = traces_below(Visit(browser, tmp_path / "page.html"), "Pairs of hyperparameters")
    layers_and_lr = maps[PAIRS.index("layers and lr")]
    assert len(layers_and_lr["x"]) == len(layers_and_lr["y"]) == 10
    assert layers_and_lr["x"][0] == "1 to 2.9"
    assert [sum(value is not None for value in row) for row in layers_and_lr["z"]] == [1] * 10


def test_the_table_has_all_trials_with_their_best_checkpoints_and_no_secret(browser: Any, page_file: Path) -> None:
    page = Visit(browser, page_file).page
    headings = page.locator("th").all_text_contents()
    rows = [
        dict(zip(headings, row.locator("td").all_text_contents(), strict=True))
        for row in page.locator("tbody tr").all()
    ]
    assert [(row["id"], row["state"], row["best"], row["checkpoint"]) for row in rows] == [
        ("1", "COMPLETED", "0.05", "1-20"),
        ("2", "COMPLETED", "0.1", "2-20"),
        ("3", "COMPLETED", "0.15", "3-20"),
        ("4", "COMPLETED", "0.2", "4-20"),
    ]
    assert "password=********" in rows[0]["hparams"]
    assert page.get_by_text("hidden", exact=True).count() == 0
