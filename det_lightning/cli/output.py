"""What the commands print: tables for people, JSON for programs, errors in one line."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import typer

from det_lightning import errors
from det_lightning.escaping import escape
from det_lightning.masking import mask_text

__all__ = [
    "as_command_line",
    "describe_age",
    "describe_metric",
    "describe_size",
    "pairs",
    "print_json",
    "print_lines",
    "print_table",
    "report_errors",
    "show_progress",
    "warn",
]

# Where nobody looks at a terminal, lines are as long as they are.
_ENDLESS = 10_000

_WRONG_CHECKPOINT = (
    errors.IncompleteCheckpointError,
    errors.InvalidCheckpointException,
    errors.UnsafeCheckpointError,
)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """End the program with one line and the right exit code where a command can not do what was asked."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever reads the output has enough of it
    except (errors.DetLightningError, ValueError, OSError) as e:
        warn(f"Error: {mask_text(str(e))}")
        raise typer.Exit(1 if isinstance(e, _WRONG_CHECKPOINT) else 2) from e


def warn(text: str) -> None:
    """Write a line to the standard error."""
    typer.echo(as_command_line(text), err=True)


def as_command_line(text: str) -> str:
    """Return a message of the library in one printable line, in the words of the command line."""
    line = " ".join(text.replace("pass trusted=True", "pass --trusted").split())
    return escape(line.replace("any_module=True", "--any-module"))


def print_json(content: Any) -> None:
    """Write ``content`` as JSON to the standard output. JSON has no NaN and infinity; they become strings."""
    typer.echo(json.dumps(_plain(content), indent=2, default=str))


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to the standard output; what is not printable in one is escaped, line breaks included."""
    for line in lines:
        typer.echo(escape(line))


def print_table(columns: list[str], rows: Iterable[list[Any]]) -> None:
    """Write a table to the standard output.

    Args:
        columns: headings; those of numbers, which are set flush right, begin with ``>``. Numbers, and the cells of the
            first column, are never broken into lines.
        rows: the cells; None is an empty one.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        is_number = column.startswith(">")
        justify: Any = "right" if is_number else "left"
        heading = Text(escape(column.removeprefix(">")))
        table.add_column(heading, justify=justify, no_wrap=is_number or index == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape("" if cell is None else cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else _ENDLESS)
    console.print(table)


def pairs(entries: Mapping[str, Any]) -> str:
    """Return ``a=1, b=2``."""
    return ", ".join(f"{name}={value!r}" for name, value in entries.items())


def describe_size(size_bytes: int) -> str:
    """Return a number of bytes with three digits and a unit."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def describe_age(age_s: float) -> str:
    """Return a duration in its largest unit."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{int(age_s // length_s)} {unit}"
    return f"{max(0, int(age_s))} s"


def describe_metric(metric: Any, with_name: bool = True) -> str | None:
    """Return ``name=value``, or the value alone, for what ``metadata.json`` or an index tells of a metric."""
    if not isinstance(metric, Mapping):
        return None
    value = metric.get("value")
    shown = f"{value:.6g}" if isinstance(value, float) else f"{value!s:.60}"
    return f"{metric['name']}={shown}" if with_name and metric.get("name") else shown


@contextlib.contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar while files are moved, if someone looks at a terminal.

    Args:
        what: stands before the bar.
        total_bytes: size of all files.

    Yields:
        What to tell of each file, with its name and size in bytes.
    """
    if not sys.stderr.isatty():
        yield lambda _name, _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(what), total=total_bytes)
        yield lambda _name, size: progress.advance(task, size)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
