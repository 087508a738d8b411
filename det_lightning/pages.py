"""Reports as pages: self-contained HTML, or Markdown, from templates."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from det_lightning.missing_parts import how_to_install


def render_page(template: str, extra: str, filters: Mapping[str, Callable[[Any], str]], **content: Any) -> str:
    """Return the page of a template, named by ``"package:file"``; raises ImportError if jinja2 is not installed.

    The template gets ``style`` and ``made_at`` besides the content. ``extra`` is what installs jinja2.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError(f"The report needs jinja2: {how_to_install(extra)}.") from error
    is_html = template.endswith(".html.jinja")
    environment = Environment(autoescape=is_html, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters.update(filters)
    style = _read("det_lightning:report.css").rstrip()
    made_at = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return environment.from_string(_read(template)).render(**content, style=style, made_at=made_at)


def _read(name: str) -> str:
    package, _, file = name.partition(":")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")
