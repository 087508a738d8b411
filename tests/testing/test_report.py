"""The conversion report: its content, and that it is self-contained."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.testing.checks import CheckResult
from det_lightning.testing.report import SIZES, make_chart, nice_ticks, write_report
from tests.testing.made_reports import CHECKS, falling, made_report


class Outline(HTMLParser):
    """The text of a page, its tags, and what they refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("style", "script"):
            self.words.append(data)


def outline(kind: str, directory: Path) -> Outline:
    return Outline(made_report(kind, directory).read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["equal", "different", "alone", "bare"])
def test_the_page_needs_nothing_else(kind: str, tmp_path: Path) -> None:
    page = made_report(kind, tmp_path).read_text(encoding="utf-8")
    found = Outline(page)
    assert found.references == []
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"\b(https?:)?//\w", page)


def test_every_check_has_its_outcome_duration_and_message(tmp_path: Path) -> None:
    text = outline("different", tmp_path).text
    assert "1 of 4 checks failed" in text
    for line in (
        "passed trains 1.2",
        "passed is deterministic under a seed 2.5",
        "not compared an old checkpoint loads no --trial-checkpoint was given 0.0",
        "failed matches the real determined <loss> differs - at batch 3 - & at all later ones 4.0",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["passed", "passed"], "All 2 checks passed"),
        (["passed"], "1 check passed"),
        (["passed", "skipped"], "1 check passed, 1 not compared"),
        (["passed", "failed", "failed"], "2 of 3 checks failed"),
        (["skipped"], "Nothing was compared"),
        ([], "Nothing was compared"),
    ],
)
def test_the_verdict_comes_first(outcomes: list[str], verdict: str, tmp_path: Path) -> None:
    write_report(tmp_path / "out.html", "t:T", [CheckResult(f"p{i}", o) for i, o in enumerate(outcomes)], {})
    text = Outline((tmp_path / "out.html").read_text(encoding="utf-8")).text
    assert text.startswith(f"{verdict} \N{EN DASH} t:T Conversion report {verdict} t:T")


def test_the_first_difference_is_shown_with_its_cause(tmp_path: Path) -> None:
    text = outline("different", tmp_path).text
    assert "First difference Metric loss at batch 3" in text
    assert f"determined 1.2.3 {falling(20)[3] * 1.2!r} det_lightning 1.2.3 {falling(20)[3]!r}" in text
    assert "ULP" in text
    assert "Allowed 0.001 relative and 1e-05 absolute (torch 1.12.1 and 2.13.0)" in text
    assert "Likely cause. The loss is computed or averaged differently" in text


def test_equality_to_the_bit_is_stated(tmp_path: Path) -> None:
    assert "equal to the bit" in outline("equal", tmp_path).text


def test_the_environments_are_side_by_side_with_differences_marked(tmp_path: Path) -> None:
    text = outline("different", tmp_path).text
    assert "Python ≠ (differs) 3.8.18 3.11.7 torch ≠ (differs) 1.12.1 2.13.0 numpy 2.4.6 2.4.6" in text
    assert "Hyperparameters lr = 0.1" in text


def test_the_curves_have_their_numbers_as_tables(tmp_path: Path) -> None:
    found = outline("different", tmp_path)
    assert found.tags.count("figure") == 2
    assert "loss At most 0.25 apart, at batch 3." in found.text
    assert "Numbers of accuracy Batches trained determined 1.2.3 det_lightning 1.2.3 2 0.5 0.5" in found.text


def test_a_trial_without_reference_has_its_own_curves(tmp_path: Path) -> None:
    found = outline("alone", tmp_path)
    assert found.tags.count("figure") == 2
    assert "First difference" not in found.text
    assert "determined 1.2.3" not in found.text


def test_markup_in_names_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    write_report(tmp_path / "out.html", evil, [CheckResult(evil, "failed", 0, evil)], {}, command=evil)
    found = Outline((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "script" not in found.tags
    assert found.text.count(evil) == 5


def test_without_jinja2_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[testing\]'"):
        made_report("equal", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_report_keeps_the_order_of_the_checks(tmp_path: Path) -> None:
    text = outline("equal", tmp_path).text
    places = [text.index(check.name) for check in CHECKS]
    assert places == sorted(places)


# Curves


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.integers(2, 9), st.booleans())
def test_ticks_are_few_even_and_within(one: float, other: float, most: int, whole: bool) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high, most, whole)
    assert 1 <= len(ticks) <= most + 1
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 7, [-2, 0, 2, 4, 6]), (0, 12, [0, 2.5, 5, 7.5, 10]), (5, 5, [5])],
)
def test_ticks_are_round(low: float, high: float, labels: list[float]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(labels)


@given(st.lists(st.floats(), min_size=1, max_size=30))
def test_every_finite_value_lies_in_the_picture(values: list[float]) -> None:
    chart = make_chart("loss", "batch", {"ours": list(enumerate(values))})
    points = [point for segment in chart.curves["ours"] for point in segment]
    assert len(points) == sum(map(math.isfinite, values))
    assert all(SIZES["left"] <= x <= SIZES["width"] and 0 <= y <= SIZES["height"] for x, y in points)


@pytest.mark.slow
def test_numbers_that_are_not_finite_leave_a_gap() -> None:
    chart = make_chart("loss", "batch", {"ours": [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)]})
    assert [len(segment) for segment in chart.curves["ours"]] == [2, 1]


def test_the_summary_is_the_largest_distance() -> None:
    def summary(*sides: list[tuple[int, float]]) -> str:
        return make_chart("loss", "batch", dict(zip(("reference", "ours"), sides, strict=False))).summary

    assert summary([(0, 1.0), (1, 2.0)], [(0, 1.5), (1, 2.0)]) == "At most 0.5 apart, at batch 0."
    assert summary([(0, math.nan)], [(0, math.nan)]) == "No difference in any value."
    assert summary([(0, 1.0)]) == ""
