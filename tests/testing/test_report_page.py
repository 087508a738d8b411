"""The conversion report in a real browser: it can be seen, read aloud, printed, and reaches for no network.

Needs playwright, axe and a Chromium: ``tox -e browser`` gets all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import LAPTOP, PHONE, Visit, chromium, needs_chromium
from tests.testing.made_reports import made_report

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["equal", "different", "alone", "bare"])
def test_page_is_accessible(browser: Any, kind: str, scheme: str, tmp_path: Path) -> None:
    """Contrast, names of pictures, headers of tables and the rest of axe's rules."""
    path = made_report(kind, tmp_path)
    visit = Visit(browser, path, viewport=LAPTOP, color_scheme=scheme)
    assert (visit.requests, visit.complaints) == ([path.as_uri()], [])
    for summary in visit.page.locator("summary").all():
        summary.click()
    assert visit.accessibility_violations() == []


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_page_fits_the_window(browser: Any, viewport: dict[str, int], tmp_path: Path) -> None:
    page = Visit(browser, made_report("different", tmp_path), viewport=viewport).page
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    # The tables of numbers scroll.
    for part in page.locator("main > *, figure, section > table, .scroll, .card").all():
        box = part.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= viewport["width"]


def test_curves_are_drawn_with_the_first_difference(browser: Any, tmp_path: Path) -> None:
    page = Visit(browser, made_report("different", tmp_path), viewport=LAPTOP).page
    traces = page.locator("#chart0").evaluate("chart => chart.data.map(({name, y}) => [name, y.length])")
    assert traces == [["reference", 20], ["ours", 20]]
    marks = page.locator(".plot").evaluate_all("all => all.map(({layout}) => layout.shapes.map(({x0}) => x0))")
    assert marks == [[3], []]
    assert page.get_by_text("first difference", exact=True).is_visible()


def test_numbers_open_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    page = Visit(browser, made_report("equal", tmp_path)).page
    table = page.get_by_role("table").filter(has_text="Batches trained")
    assert not table.is_visible()
    page.get_by_text("Numbers of accuracy").focus()
    page.keyboard.press("Enter")
    assert table.is_visible()


def test_printed_page_is_light(browser: Any, tmp_path: Path) -> None:
    page = Visit(browser, made_report("different", tmp_path), color_scheme="dark").page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("details").first.is_visible()
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF")
    assert 1 <= pdf.count(b"/Type /Page\n") <= 3
