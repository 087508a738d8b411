"""The command ``det-lightning port``: its arguments."""

from __future__ import annotations

import enum
import importlib.util
import pathlib
from typing import Annotated

import typer

from det_lightning.cli.arguments import JsonFlag
from det_lightning.cli.output import report_errors

__all__ = ["EXIT_CODES", "port"]

EXIT_CODES = (
    "Exit codes: 0 all is fine; 1 with --check, when something would change or is left to do; 2 the command was not "
    "used as it should be."
)
_NEEDED = ("libcst", "yaml")


class Target(str, enum.Enum):
    """What ``port`` writes."""

    det_lightning = "det_lightning"
    lightning = "lightning"


def port(
    paths: Annotated[
        list[pathlib.Path],
        typer.Argument(metavar="PATH...", help="Files, and directories with files, of a project.", show_default=False),
    ],
    diff: Annotated[bool, typer.Option("--diff", help="Only show what would change. The default.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; end with 1 if there is something to change or to do.")
    ] = False,
    to: Annotated[
        Target, typer.Option(help="lightning: write one trial as a LightningModule that needs no det_lightning.")
    ] = Target.det_lightning,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", help="With --to lightning: the file to write; by default the standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --output if it exists.")] = False,
    json: JsonFlag = False,
) -> None:
    """Port a Determined project: Python, notebooks, experiment files, shell scripts, Dockerfiles, requirements.

    What can not be rewritten is listed with what to do about it. A line with the comment `# det-lightning: ok` is not.
    """
    with report_errors():
        _require_libraries()
        if to is Target.lightning:
            if diff or write or check or json:
                raise ValueError(
                    "--to lightning writes a new file; --diff, --write, --check and --json do not go with it."
                )
            from det_lightning.cli.lightning_module import write_lightning_module

            write_lightning_module(paths, output, force)
            return
        if output is not None or force:
            raise ValueError("--output and --force go with --to lightning only; --write changes the files in place.")
        if write and (check or diff):
            raise ValueError(f"--write changes files and --{'check' if check else 'diff'} does not: give one of them.")
        from det_lightning.cli.port_report import port_project

        if not port_project(paths, write, check, diff or not (write or check), json) and check:
            raise typer.Exit(1)


def _require_libraries() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"The porting tool needs {' and '.join(missing)}: pip install 'det-lightning[port]'.")
