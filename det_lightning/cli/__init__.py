"""The program ``det-lightning``. Each command imports what it needs when it runs, so that ``--help`` is fast."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command that the command line names."""
    from det_lightning.cli.app import app

    app()
