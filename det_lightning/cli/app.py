"""The commands of ``det-lightning``, put together."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

import typer

from det_lightning.cli import checkpoint_reading, checkpoint_writing, experiment, port
from det_lightning.cli.arguments import EXIT_CODES, TYPER_SETTINGS
from det_lightning.cli.output import MaskingGroup

app = typer.Typer(help="Determined trials on PyTorch Lightning.", epilog=EXIT_CODES, cls=MaskingGroup, **TYPER_SETTINGS)

_command: Any

_checkpoint = typer.Typer(help="List, inspect, convert and delete checkpoints.", epilog=EXIT_CODES, **TYPER_SETTINGS)
_checkpoint.command("ls", epilog=EXIT_CODES)(checkpoint_reading.list_checkpoints)
for _command in (checkpoint_reading.show, checkpoint_reading.verify, checkpoint_writing.export):
    _checkpoint.command(epilog=EXIT_CODES)(_command)
_checkpoint.command("import", epilog=EXIT_CODES)(checkpoint_writing.import_file)
for _command in (checkpoint_writing.merge, checkpoint_writing.annotate, checkpoint_writing.prune):
    _checkpoint.command(epilog=EXIT_CODES)(_command)

_experiment = typer.Typer(help="Run experiments, and look at them.", epilog=experiment.EXIT_CODES, **TYPER_SETTINGS)
for _command in (experiment.run, experiment.check, experiment.ls, experiment.show, experiment.logs, experiment.resume,
                 experiment.stop):  # fmt: skip
    _experiment.command(epilog=experiment.EXIT_CODES)(_command)

app.command("run", epilog=experiment.EXIT_CODES, no_args_is_help=True)(experiment.run)
app.add_typer(_experiment, name="experiment")
app.add_typer(_checkpoint, name="checkpoint")
app.command("port", epilog=port.EXIT_CODES, no_args_is_help=True)(port.port)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"det-lightning {importlib.metadata.version('det-lightning')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
