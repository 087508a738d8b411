"""The output of commands: tables for people, JSON for programs, errors in one line."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer

from det_lightning import errors
from det_lightning.escaping import escape
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import escape_surrogates, to_json
from det_lightning.masking import mask_text

_WRONG_CHECKPOINT = (errors.IncompleteCheckpointError, errors.InvalidCheckpointException, errors.UnsafeCheckpointError)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Exit with a one-line message and the right exit code after an expected error."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has closed the output
    except (errors.DetLightningError, ValueError, OSError) as e:
        warn(f"Error: {as_command_line(str(e))}")
        raise typer.Exit(1 if isinstance(e, _WRONG_CHECKPOINT) else 2) from e


def warn(text: str) -> None:
    """Write a line to standard error, with unprintable characters escaped, and passwords in URLs masked."""
    typer.echo(mask_text(escape(text)), err=True)


def as_command_line(text: str) -> str:
    """Return a message of the library on one line, with command-line options in place of arguments."""
    # Spaces within a line stay, since the path of a command may contain some.
    line = re.sub(r"\s*\n\s*", " ", text.strip().replace("pass trusted=True", "pass --trusted"))
    return mask_text(escape(line))


def print_json(content: Any) -> None:
    """Write ``content`` as strict JSON to standard output."""
    typer.echo(to_json(escape_surrogates(as_plain(content)), indent=2))


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to standard output, with unprintable characters, including line breaks, escaped."""
    for line in lines:
        typer.echo(escape(line))


def print_table(columns: list[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; ``>`` in a heading marks a column of numbers. A terminal wraps neither these nor the first."""
    headings = [column.removeprefix(">") for column in columns]
    cells = [["" if cell is None else escape(cell) for cell in row] for row in [headings, *rows]]
    are_numbers = [column.startswith(">") for column in columns]
    if sys.stdout.isatty():
        _print_wrapped(cells, are_numbers)
    else:
        _print_plain(cells, are_numbers)


def _print_plain(cells: list[list[str]], are_numbers: list[bool]) -> None:
    """Write a table to a file or another program; no line is wrapped, and thousands of rows take no time."""
    from rich.cells import cell_len

    columns = [*zip(*cells, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    padded = []
    for column, width, is_number in zip(columns, widths, are_numbers, strict=True):
        spaced = [(cell, " " * (width - cell_len(cell))) for cell in column]
        padded.append([space + cell if is_number else cell + space for cell, space in spaced])
    lines = ["  ".join(row) for row in zip(*padded, strict=True)]
    lines.insert(1, "─" * (sum(widths) + 2 * (len(widths) - 1)))
    typer.echo("\n".join(lines))


def _print_wrapped(cells: list[list[str]], are_numbers: list[bool]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    headings, *rows = cells
    for index, (heading, is_number) in enumerate(zip(headings, are_numbers, strict=True)):
        justify: Any = "right" if is_number else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=is_number or index == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def pairs(entries: Mapping[str, Any]) -> str:
    """Return ``a=1, b=2``."""
    return ", ".join(f"{name}={value!r}" for name, value in entries.items())


def describe_age(age_s: float) -> str:
    """Return a duration in the largest unit."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{int(age_s // length_s)} {unit}"
    return f"{max(0, int(age_s))} s"


def describe_metric(metric: Any, with_name: bool = True) -> str | None:
    """Return ``name=value``, or the value alone, for a metric from ``metadata.json`` or an index."""
    if not isinstance(metric, Mapping):
        return None
    value = metric.get("value")
    shown = f"{value:.6g}" if isinstance(value, float) else f"{value!s:.60}"
    return f"{metric['name']}={shown}" if with_name and metric.get("name") else shown


@contextlib.contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar at a terminal while files are transferred; yield a function to call with each file's name and size."""
    if not sys.stderr.isatty():
        yield lambda _name, _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(what), total=total_bytes)
        yield lambda _name, size: progress.advance(task, size)
