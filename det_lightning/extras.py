"""How to install the libraries that only some parts of det_lightning need."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, such as ``s3``, and the one to use in a clone of the source."""
    return f"pip install 'det-lightning[{extra}]', or pip install -e '.[{extra}]' in a clone of det_lightning"
