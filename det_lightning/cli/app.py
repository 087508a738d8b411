"""Registers the commands of ``det-lightning`` in groups, each with an example and a page of the documentation."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Annotated

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

_EXIT_CODES = (
    "Exit codes: 0 success; 1 the command failed, or found something wrong; 2 wrong usage. Each command's --help has "
    "more."
)


def _epilog(example: str, page: str, exit_codes: str) -> str:
    return f"Example: det-lightning {example}\n\nDocumentation: docs/{page}.md of the repository\n\n{exit_codes}"


app = typer.Typer(
    help="Determined trials on PyTorch Lightning.",
    epilog=_epilog("run const.yaml", "index", _EXIT_CODES),
    cls=MaskingGroup,
    **{**TYPER_SETTINGS, "add_completion": True},
)
# The page of the documentation and the exit codes.
_EXPERIMENTS = ("experiments", experiment.EXIT_CODES)
_CHECKPOINTS = ("checkpoints", arguments.EXIT_CODES)
_GROUPS = [
    ("experiment", "Run, show and compare experiments.", "ls", _EXPERIMENTS),
    ("checkpoint", "List, inspect, convert and delete checkpoints.", "ls s3://bucket/prefix", _CHECKPOINTS),
]
_COMMANDS: list[tuple[str, Callable[..., None], str, tuple[str, str]]] = [
    ("run", experiment.run, "const.yaml", _EXPERIMENTS),
    ("port", port.port, ". --diff", ("porting", port.EXIT_CODES)),
    ("experiment run", experiment.run, "const.yaml", _EXPERIMENTS),
    ("experiment check", experiment.check, "*.yaml", _EXPERIMENTS),
    ("experiment ls", experiment_reading.ls, "", _EXPERIMENTS),
    ("experiment show", experiment_reading.show, "experiments/mnist-1", _EXPERIMENTS),
    ("experiment compare", experiment_reading.compare, "experiments/mnist-1 experiments/mnist-2", _EXPERIMENTS),
    ("experiment logs", experiment_reading.logs, "experiments/mnist-1 1", _EXPERIMENTS),
    ("experiment resume", experiment.resume, "experiments/mnist-1", _EXPERIMENTS),
    ("experiment stop", experiment.stop, "experiments/mnist-1", _EXPERIMENTS),
    ("checkpoint ls", checkpoint_reading.list_checkpoints, "s3://bucket/prefix", _CHECKPOINTS),
    ("checkpoint show", checkpoint_reading.show, "s3://bucket/prefix/UUID", _CHECKPOINTS),
    ("checkpoint verify", checkpoint_reading.verify, "s3://bucket/prefix", _CHECKPOINTS),
    ("checkpoint export", checkpoint_export.export, "checkpoints/UUID --to weights -o weights.pt", _CHECKPOINTS),
    ("checkpoint import", checkpoint_writing.import_file, "last.ckpt checkpoints", _CHECKPOINTS),
    ("checkpoint merge", checkpoint_writing.merge, "checkpoints/UUID", _CHECKPOINTS),
    ("checkpoint annotate", checkpoint_writing.annotate, "s3://bucket/prefix export/*.json --dry-run", _CHECKPOINTS),
    ("checkpoint prune", checkpoint_writing.prune, "s3://bucket/prefix --trial-best 1 --dry-run", _CHECKPOINTS),
]
_groups = {"": app}
for _name, _summary, _example, _page in _GROUPS:
    _groups[_name] = typer.Typer(
        help=_summary, epilog=_epilog(f"{_name} {_example}", *_page), cls=CommandGroup, **TYPER_SETTINGS
    )
    app.add_typer(_groups[_name], name=_name)
for _path, _function, _example, _page in _COMMANDS:
    _group, _, _name = _path.rpartition(" ")
    _epilog_of = _epilog(f"{_path} {_example}".rstrip(), *_page)
    _groups[_group].command(_name, epilog=_epilog_of, cls=Command, no_args_is_help=not _group)(_function)


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
