"""Pages in a real browser. Needs playwright, axe and a Chromium: ``tox -e browser`` gets all three."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("DET_LIGHTNING_CHROMIUM") or shutil.which("chromium") or ""

axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="playwright and axe are not installed; run tox -e browser"
)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run tox -e browser")

needs_chromium = pytest.mark.skipif(
    not Path(CHROMIUM).is_file(),
    reason="there is no Chromium: install Debian's chromium, or npm, and run tox -e browser",
)

LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 800}


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser."""
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs rights that containers do not give; the page is our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """An open page with its requests and its messages."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_page(**context)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())

    def accessibility_violations(self) -> list[tuple[str, list[str]]]:
        """Return the rules of axe that the page breaks, each with the elements concerned."""
        violations = axe.Axe().run(self.page).response["violations"]
        return [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in violations]
