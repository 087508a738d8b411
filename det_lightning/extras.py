"""How to install the libraries that only some parts of det_lightning need."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra, such as ``s3``, and the one to use in a clone of the source."""
    return f"pip install 'det-lightning[{extra}]', or pip install -e '.[{extra}]' in a clone of det_lightning"


def how_to_build_horovod() -> str:
    """Return what to do for Horovod, which no extra installs."""
    return (
        f"There are no wheels of it: {how_to_install('horovod')} for what it needs, then run scripts/build_horovod.sh "
        "of the source of det-lightning, which builds and installs it."
    )
