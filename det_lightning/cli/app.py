"""All commands of ``det-lightning`` in groups, each with an example and a page of the documentation."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Annotated, Any

import typer

from det_lightning.cli import (
    arguments,
    checkpoint_export,
    checkpoint_reading,
    checkpoint_writing,
    experiment,
    experiment_reading,
    port,
)
from det_lightning.cli.arguments import TYPER_SETTINGS
from det_lightning.cli.command_groups import Command, CommandGroup, MaskingGroup

# Where the pages of the documentation are: in a clone, as long as no site has an address.
_DOCS = "docs"


def _epilog(example: str, page: str, exit_codes: str) -> str:
    return f"Example: det-lightning {example}\n\nDocumentation: {_DOCS}/{page}.md\n\n{exit_codes}"


def _add_to(group: typer.Typer, page: str, exit_codes: str) -> Callable[..., None]:
    """Return a function that adds a command with an example to a group."""

    def add(function: Callable[..., None], name: str, example: str, **settings: Any) -> None:
        group.command(name, epilog=_epilog(example, page, exit_codes), cls=Command, **settings)(function)

    return add


app = typer.Typer(
    help="Determined trials on PyTorch Lightning.",
    epilog=_epilog("run const.yaml", "index", arguments.EXIT_CODES),
    cls=MaskingGroup,
    **{**TYPER_SETTINGS, "add_completion": True},
)
_add_to(app, "experiments", experiment.EXIT_CODES)(experiment.run, "run", "run const.yaml", no_args_is_help=True)


def _add_group(name: str, summary: str, example: str, exit_codes: str) -> Callable[..., None]:
    """Add a group of commands, documented on the page ``NAMEs``; return a function that adds commands."""
    group = typer.Typer(
        help=summary, epilog=_epilog(example, f"{name}s", exit_codes), cls=CommandGroup, **TYPER_SETTINGS
    )
    app.add_typer(group, name=name)
    return _add_to(group, f"{name}s", exit_codes)


_add = _add_group("experiment", "Run, show and compare experiments.", "experiment ls", experiment.EXIT_CODES)
_add(experiment.run, "run", "experiment run const.yaml")
_add(experiment.check, "check", "experiment check *.yaml")
_add(experiment_reading.ls, "ls", "experiment ls")
_add(experiment_reading.show, "show", "experiment show experiments/mnist-1 --sort validation_loss")
_add(
    experiment_reading.compare, "compare", "experiment compare experiments/mnist-1 experiments/mnist-2 --html page.html"
)
_add(experiment_reading.logs, "logs", "experiment logs experiments/mnist-1 1")
_add(experiment.resume, "resume", "experiment resume experiments/mnist-1")
_add(experiment.stop, "stop", "experiment stop experiments/mnist-1")

_add = _add_group(
    "checkpoint",
    "List, inspect, convert and delete checkpoints.",
    "checkpoint ls s3://bucket/prefix",
    arguments.EXIT_CODES,
)
_add(checkpoint_reading.list_checkpoints, "ls", "checkpoint ls s3://bucket/prefix")
_add(checkpoint_reading.show, "show", "checkpoint show s3://bucket/prefix/UUID")
_add(checkpoint_reading.verify, "verify", "checkpoint verify s3://bucket/prefix")
_add(checkpoint_export.export, "export", "checkpoint export checkpoints/UUID --to weights -o weights.pt")
_add(checkpoint_writing.import_file, "import", "checkpoint import last.ckpt checkpoints")
_add(checkpoint_writing.merge, "merge", "checkpoint merge checkpoints/UUID")
_add(checkpoint_writing.annotate, "annotate", "checkpoint annotate s3://bucket/prefix export/*.json --dry-run")
_add(checkpoint_writing.prune, "prune", "checkpoint prune s3://bucket/prefix --trial-best 1 --dry-run")

_add_to(app, "porting", port.EXIT_CODES)(port.port, "port", "port . --diff", no_args_is_help=True)


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
