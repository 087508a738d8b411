"""The command ``det-lightning port``: its arguments."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Annotated

import typer

from det_lightning.cli.arguments import JsonFlag
from det_lightning.cli.output import report_errors

__all__ = ["EXIT_CODES", "port"]

EXIT_CODES = (
    "Exit codes: 0 all is fine; 1 with --check, when something would change or is left to do; 2 the command was not "
    "used as it should be, or a file can not be read or written."
)
_NEEDED = ("libcst", "yaml")


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
    json: JsonFlag = False,
) -> None:
    """Port a Determined project: Python, notebooks, experiment files, shell scripts, Dockerfiles, requirements.

    What can not be rewritten is listed with what to do about it. A line with the comment `# det-lightning: ok` is not.
    """
    with report_errors():
        _require_libraries()
        if write and (check or diff):
            raise ValueError(f"--write changes files and --{'check' if check else 'diff'} does not: give one of them.")
        from det_lightning.cli.port_report import port_project

        if not port_project(paths, write, check, diff or not (write or check), json) and check:
            raise typer.Exit(1)


def _require_libraries() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"The porting tool needs {' and '.join(missing)}: pip install 'det-lightning[port]'.")
