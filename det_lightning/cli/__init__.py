"""The program ``det-lightning``; commands import their parts only when run, so that ``--help`` is fast."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the program with the arguments of the command line."""
    from det_lightning.cli.app import app

    app()
