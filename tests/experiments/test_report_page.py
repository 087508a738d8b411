"""The page of an experiment in a real browser: its charts hold the data, fit the window, and reach for no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import LAPTOP, PHONE, Visit, chromium, needs_chromium
from tests.experiments.made_experiments import made_experiment, make_details

plotly = pytest.importorskip("plotly", reason="plotly is not installed; run tox -e browser")

from det_lightning.experiments.overview import describe_experiment  # noqa: E402
from det_lightning.experiments.report import write_report  # noqa: E402

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of four trials, the first of which has reported its training loss."""
    folder = tmp_path_factory.mktemp("experiment")
    directory = made_experiment(folder, trials=4)
    directory.trial(1).mkdir(parents=True)
    record = {"group": "training", "run": 1, "steps_completed": 10, "metrics": {"loss": 0.7}, "time": 2.0}
    (directory.trial(1) / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    write_report(describe_experiment(directory, with_curves=True), folder / "page.html")
    return folder / "page.html"


def traces(visit: Visit, chart: str) -> list[dict[str, Any]]:
    """Return what a chart shows, as plotly has it after drawing."""
    pick = "({x, y, name, text, marker}) => ({x, y, name, text, colors: marker?.color})"
    found: list[dict[str, Any]] = visit.page.locator(f"#{chart}").evaluate(f"chart => chart.data.map({pick})")
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_page_is_accessible_and_fits(browser: Any, viewport: dict[str, int], scheme: str, page_file: Path) -> None:
    """All of axe's rules hold for all of the page, plotly's charts included."""
    visit = Visit(browser, page_file, viewport=viewport, color_scheme=scheme)
    assert visit.requests == [page_file.as_uri()]
    assert visit.complaints == []
    assert visit.accessibility_violations() == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for part in visit.page.locator("main > *, .scroll, select, .plot, .plot .main-svg").all():
        box = part.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]


def test_curves_are_of_the_chosen_metric(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file)
    assert [(curve["name"], curve["x"], curve["y"]) for curve in traces(visit, "curves")] == [
        (f"Trial {trial}", [10, 20], [trial / 10, trial / 20]) for trial in (1, 2, 3, 4)
    ]
    visit.page.locator("#metric").select_option("training loss")
    assert [(curve["name"], curve["x"], curve["y"]) for curve in traces(visit, "curves")] == [("Trial 1", [10], [0.7])]
    assert [points["colors"] for points in traces(visit, "points")] == [[0.7]]


def test_late_curves_are_drawn(browser: Any, tmp_path: Path) -> None:
    """The only validation was at batch 0, before the first report of a training loss."""
    write_report(make_details(validation=[(0, 2.0)], training=[(10, 0.5), (20, 0.75)]), tmp_path / "page.html")
    visit = Visit(browser, tmp_path / "page.html")
    visit.page.locator("#metric").select_option("training loss")
    assert [(curve["x"], curve["y"]) for curve in traces(visit, "curves")] == [([10, 20], [0.5, 0.75])]


def test_values_are_no_links(browser: Any, tmp_path: Path) -> None:
    link = "<a href='http://example.com'>click</a>"
    details = make_details(validation=[(0, 2.0)], training=[])
    (trial,) = details["trials"]
    trial["curves"][link] = [(0, 1.0)]
    details["trials"] = [{**trial, "hparams": {"kind": link}}, {**trial, "id": 2, "hparams": {"kind": "b"}}]
    write_report(details, tmp_path / "page.html")
    visit = Visit(browser, tmp_path / "page.html")
    visit.page.locator("#metric").select_option(link)
    assert visit.page.locator(".plot a").count() == 0
    assert visit.page.locator("#points .cbtitle").text_content() == link
    assert visit.page.locator("#points .xtick text").first.text_content() == link


def test_points_have_the_metric_as_color(browser: Any, page_file: Path) -> None:
    visit = Visit(browser, page_file)
    ((points,), axes) = traces(visit, "points"), visit.page.locator("#points").evaluate("chart => chart.layout")
    # The best trial comes last, above the others. The learning rates span several powers of ten.
    assert points["x"] == [4, 3, 2, 1]
    assert points["y"] == pytest.approx([0.0001, 0.001, 0.01, 0.1])
    assert points["colors"] == [0.2, 0.15, 0.1, 0.05]
    kinds = [(axes[axis]["title"]["text"], axes[axis]["type"]) for axis in ("xaxis", "yaxis")]
    assert kinds == [("layers", "linear"), ("lr", "log")]
    visit.page.locator("#x").select_option("kind")
    visit.page.locator("#y").select_option("the metric")
    (points,) = traces(visit, "points")
    assert (points["x"], points["y"]) == (["a", "b", "a", "b"], [0.2, 0.15, 0.1, 0.05])


def test_parallel_lines_end_at_the_metric(browser: Any, page_file: Path) -> None:
    lines = traces(Visit(browser, page_file), "parallel")
    assert [line["name"] for line in lines] == ["Trial 4", "Trial 3", "Trial 2", "Trial 1"]
    assert lines[-1]["text"] == ["layers: 1", "lr: 0.1", "kind: b", "loss: 0.05"]
    assert [line["y"][1] for line in lines] == pytest.approx([0, 1 / 3, 2 / 3, 1])  # by the logarithm


def test_table_marks_the_best_and_sorts(browser: Any, page_file: Path) -> None:
    page = Visit(browser, page_file).page
    ids = page.locator("#trials tbody td:first-child")
    assert ids.all_text_contents() == ["* 1", "2", "3", "4"]
    assert page.locator("tr.best td").first.text_content() == "* 1"
    page.get_by_role("button", name="BEST").click()
    page.keyboard.press("Enter")
    assert ids.all_text_contents() == ["4", "3", "2", "* 1"]
    assert page.locator("th[aria-sort]").all_text_contents() == ["BEST"]
    assert page.get_by_text("The same in all trials: constant=5, password=hidden").is_visible()
