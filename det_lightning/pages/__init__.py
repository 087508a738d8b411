"""HTML reports from Jinja templates; the pages contain style, script and plotly's library."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

from det_lightning.files.strict_json import escape_surrogates
from det_lightning.missing_parts import how_to_install

# More points of a curve than pixels of a screen only make a page large.
_MOST_POINTS = 1000


def render_page(
    template: str, extra: str, filters: Mapping[str, Callable[[Any], str]], *, charts: Any = None, **content: Any
) -> str:
    """Return the page of a template, named by ``"package:file"``.

    ``charts`` is the JSON for the page's script; a page without charts needs no plotly.

    Raises:
        ImportError: jinja2 or plotly is not installed; the message names the extra to install.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined

        library = "" if charts is None else _read_plotly()
    except ImportError as error:
        raise ImportError(f"The report needs jinja2 and plotly: {how_to_install(extra)}.") from error
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(filters)
    environment.policies["json.dumps_kwargs"] = {}  # by default, names are sorted
    made_at = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return environment.get_template(template).render(
        **content, charts=escape_surrogates(charts), library=library, made_at=made_at
    )


def _read_plotly() -> str:
    import plotly.offline

    library: str = plotly.offline.get_plotlyjs()
    return library


def _read(name: str) -> str:
    package, _, file = name.partition(":")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def make_curve(points: Iterable[tuple[float, float]]) -> list[list[float]]:
    """Return the batches and the values of a curve for a chart: in order, and at most about a thousand of each."""
    found = sorted(points, key=lambda point: point[0])
    kept = found[:: math.ceil(len(found) / _MOST_POINTS) or 1]
    kept += found[-1:] if kept and kept[-1] is not found[-1] else []
    return [[batch for batch, _ in kept], [value for _, value in kept]]
