"""How Sphinx builds the site: ``tox -e docs``, with warnings as errors."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "det_lightning"
author = "the authors of det_lightning"
release = importlib.metadata.version("det-lightning")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "project_pages",
    "public_names",
]
exclude_patterns = ["_build", "_ext", "cluster", "examples", "project/map.md"]

myst_heading_anchors = 4

# A public name is shown with what users call; what it is made of, and where, may change.
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 100

# Not of the output of programs.
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre, div.highlight-yaml pre"

html_theme = "furo"
html_title = f"det_lightning {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False

# Only `tox -e links` looks at pages elsewhere.
linkcheck_ignore = [r"http://localhost.*", r"https?://host.*"]
linkcheck_timeout = 20
linkcheck_retries = 2
