"""The conversion report: its content, and that it is self-contained."""

from __future__ import annotations

import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from det_lightning.testing.checks import CheckResult
from det_lightning.testing.report import summarize_distance, write_report
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
def test_page_needs_nothing_else(kind: str, tmp_path: Path) -> None:
    found = Outline(made_report(kind, tmp_path).read_text(encoding="utf-8"))
    assert found.references == []
    assert not {"link", "img", "iframe", "object"} & set(found.tags)
    assert ("script" in found.tags) == (kind != "bare")


def test_different_trainings_are_shown(tmp_path: Path) -> None:
    found = outline("different", tmp_path)
    text = found.text
    for line in (
        "1 of 4 checks failed",
        "passed trains 1.2 s",
        "passed is deterministic under a seed 2.5 s",
        "not compared an old checkpoint loads 0.0 s no --trial-checkpoint was given",
        "failed matches the real determined 4.0 s <loss> differs - at batch 3 - & at all later ones",
    ):
        assert line in text
    assert "First difference Metric loss at batch 3" in text
    assert f"determined 1.2.3 {falling(20)[3] * 1.2!r} det_lightning 1.2.3 {falling(20)[3]!r}" in text
    assert "Allowed 0.001 relative and 1e-05 absolute (torch 1.12.1 and 2.13.0)" in text
    assert "Likely cause. The loss is computed or averaged differently" in text
    assert "Python (differs) 3.8.18 3.11.7 torch (differs) 1.12.1 2.13.0 numpy 2.4.6 2.4.6" in text
    assert "Hyperparameters: lr = 0.1" in text
    assert found.tags.count("figure") == 2
    assert "loss At most 0.25 apart, at batch 3." in text
    assert "Numbers of accuracy Batches trained determined 1.2.3 det_lightning 1.2.3 2 0.5 0.5" in text


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
def test_verdict_comes_first(outcomes: list[str], verdict: str, tmp_path: Path) -> None:
    write_report(tmp_path / "out.html", "t:T", [CheckResult(f"p{i}", o) for i, o in enumerate(outcomes)], {})
    text = Outline((tmp_path / "out.html").read_text(encoding="utf-8")).text
    assert text.startswith(f"{verdict} \N{EN DASH} t:T Conversion report {verdict} t:T")


def test_equal_trainings_are_shown(tmp_path: Path) -> None:
    text = outline("equal", tmp_path).text
    assert "equal to the bit" in text
    places = [text.index(check.name) for check in CHECKS]
    assert places == sorted(places)


def test_markup_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    write_report(tmp_path / "out.html", evil, [CheckResult(evil, "failed", 0, evil)], {}, command=evil)
    found = Outline((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "script" not in found.tags
    assert found.text.count(evil) == 5


def test_missing_jinja2_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[testing\]'"):
        made_report("equal", tmp_path)
    assert not list(tmp_path.iterdir())


def test_distance_is_the_largest() -> None:
    assert summarize_distance({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.0}) == "At most 0.5 apart, at batch 0."
    assert summarize_distance({0: math.nan}, {0: math.nan}) == "No difference in any value."
