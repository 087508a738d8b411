"""The program ``det-lightning``. Imports what a command needs when it runs, so that ``--help`` answers at once."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command that the command line names."""
    from det_lightning.cli.app import app

    app()
