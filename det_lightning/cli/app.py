"""The commands of ``det-lightning``, put together."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from det_lightning.cli import checkpoint, porting
from det_lightning.cli.arguments import EXIT_CODES, TYPER_SETTINGS

__all__ = ["app"]

app = typer.Typer(help="Determined trials on PyTorch Lightning.", epilog=EXIT_CODES, **TYPER_SETTINGS)
app.add_typer(checkpoint.app, name="checkpoint")
app.command(epilog=porting.EXIT_CODES, no_args_is_help=True)(porting.port)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"det-lightning {importlib.metadata.version('det-lightning')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass
