"""The commands of ``det-lightning``, put together."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from det_lightning.cli import checkpoint_reading, checkpoint_writing, experiment, experiment_reading, port
from det_lightning.cli.arguments import EXIT_CODES, TYPER_SETTINGS
from det_lightning.cli.output import CommandGroup, MaskingGroup

app = typer.Typer(help="Determined trials on PyTorch Lightning.", epilog=EXIT_CODES, cls=MaskingGroup, **TYPER_SETTINGS)

_checkpoint = typer.Typer(
    help="List, inspect, convert and delete checkpoints.", epilog=EXIT_CODES, cls=CommandGroup, **TYPER_SETTINGS
)
_checkpoint.command("ls", epilog=EXIT_CODES)(checkpoint_reading.list_checkpoints)
_checkpoint.command("show", epilog=EXIT_CODES)(checkpoint_reading.show)
_checkpoint.command("verify", epilog=EXIT_CODES)(checkpoint_reading.verify)
_checkpoint.command("export", epilog=EXIT_CODES)(checkpoint_writing.export)
_checkpoint.command("import", epilog=EXIT_CODES)(checkpoint_writing.import_file)
_checkpoint.command("merge", epilog=EXIT_CODES)(checkpoint_writing.merge)
_checkpoint.command("annotate", epilog=EXIT_CODES)(checkpoint_writing.annotate)
_checkpoint.command("prune", epilog=EXIT_CODES)(checkpoint_writing.prune)

_experiment = typer.Typer(
    help="Run experiments, and look at them.", epilog=experiment.EXIT_CODES, cls=CommandGroup, **TYPER_SETTINGS
)
_experiment.command("run", epilog=experiment.EXIT_CODES)(experiment.run)
_experiment.command("check", epilog=experiment.EXIT_CODES)(experiment.check)
_experiment.command("ls", epilog=experiment.EXIT_CODES)(experiment_reading.ls)
_experiment.command("show", epilog=experiment.EXIT_CODES)(experiment_reading.show)
_experiment.command("logs", epilog=experiment.EXIT_CODES)(experiment_reading.logs)
_experiment.command("resume", epilog=experiment.EXIT_CODES)(experiment.resume)
_experiment.command("stop", epilog=experiment.EXIT_CODES)(experiment.stop)

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
