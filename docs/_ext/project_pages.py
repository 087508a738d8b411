"""Pages of the repository that are outside of docs/ and part of the site, and the links to them."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]

#: The page of the site, without its ending, and the file.
PAGES = {
    "project/benchmarks": "benchmarks/README.md",
    "project/changelog": "CHANGELOG.md",
    "project/security": "SECURITY.md",
}


def read_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the text of a file in the place of its page, and the names of pages into links to such files."""
    if page in PAGES:
        text = (ROOT / PAGES[page]).read_text(encoding="utf-8")
        source[0] = text.replace("](docs/", "](../").replace("](../docs/", "](../")
        return
    up = "../" * (page.count("/") + 1)
    for name, file in PAGES.items():
        source[0] = source[0].replace(f"]({up}{file}", f"]({up[3:]}{name}.md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Read pages through this module."""
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True}
