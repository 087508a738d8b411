"""The reference of the site, as ``tox -e docs`` builds it: every public name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.test_public_api import PUBLIC

if "DET_LIGHTNING_SITE" not in os.environ:
    pytest.skip("there is no built site; run tox -e docs", allow_module_level=True)

REFERENCE = Path(os.environ.get("DET_LIGHTNING_SITE", "")) / "reference"
_OBJECT = re.compile(r'<dt class="sig sig-object py" id="([^"]+)"')
#: A module that is a public name of another one: it has a page, or its few words are on the page.
_MODULE = re.compile(r'id="module-([\w.]+)"|href="[\w.]*#module-([\w.]+)"')


def shown_on(page: str, module: str) -> set[str]:
    """Return the names directly in a module that its page documents."""
    article = page[page.index("<article") : page.index("</article>")]
    paths = {*_OBJECT.findall(article), *("".join(found) for found in _MODULE.findall(article))}
    names = {path.removeprefix(f"{module}.") for path in paths if path.startswith(f"{module}.")}
    return {name for name in names if "." not in name}


@pytest.mark.parametrize("module", PUBLIC)
def test_page_shows_public_names(module: str) -> None:
    page = (REFERENCE / f"{module}.html").read_text(encoding="utf-8")
    assert sorted(shown_on(page, module)) == sorted(PUBLIC[module].split())


def test_each_public_module_has_page() -> None:
    assert {path.stem for path in REFERENCE.glob("det_lightning*.html")} == set(PUBLIC)
