"""How users install det_lightning and the libraries of its extras, before and after the first release."""

from __future__ import annotations

#: Whether the package index has a release. docs/project/release.md says when to change this.
IS_PUBLISHED = False


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, such as ``s3``."""
    if IS_PUBLISHED:
        return f"pip install 'det-lightning[{extra}]'"
    return f"pip install -e '.[{extra}]' in a clone of det_lightning"


def explain_requirement() -> str | None:
    """Return how to satisfy the requirement that ``port`` writes, if the package index cannot."""
    if IS_PUBLISHED:
        return None
    return "det-lightning has no release yet: install it from a clone (pip install -e CLONE) before the requirements."


def how_to_build_horovod() -> str:
    """Return how to install Horovod, for which there are no wheels."""
    return (
        f"There are no wheels of it: {how_to_install('horovod')} for what it needs, then run scripts/build_horovod.sh "
        "of the source of det-lightning, which builds and installs it."
    )
