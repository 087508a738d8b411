"""The output of commands: tables for people, JSON for programs, errors in one line."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from det_lightning import errors
from det_lightning.escaping import escape
from det_lightning.files.plain_values import as_plain
from det_lightning.files.strict_json import escape_surrogates, to_json
from det_lightning.masking import mask_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# Lines are not wrapped if the output is not a terminal, unless a table is for people only.
_ENDLESS = 10_000
# Between two columns of a table.
_GAP = 2

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


def print_table(columns: list[str], rows: Iterable[list[Any]], piped_width: int = _ENDLESS) -> None:
    """Write a table; ``>`` in a heading marks a column of numbers. Such a column and the first are never wrapped.

    Where a terminal is too narrow for the longest words of all columns, the last columns follow as further tables, each
    with the first column.
    """
    from rich.console import Console
    from rich.text import Text

    headings = [column.removeprefix(">") for column in columns]
    if not sys.stdout.isatty() and piped_width == _ENDLESS:
        _print_plain([["" if cell is None else escape(cell) for cell in row] for row in [headings, *rows]], columns)
        return
    console = Console(width=None if sys.stdout.isatty() else piped_width)
    cells = [[Text("" if cell is None else escape(cell)) for cell in row] for row in [headings, *rows]]
    fixed = [index == 0 or column.startswith(">") for index, column in enumerate(columns)]
    least = [_least_width([row[index] for row in cells], is_fixed) for index, is_fixed in enumerate(fixed)]
    for number, block in enumerate(_divide_columns(least, console.width)):
        if number > 0:
            console.print()
        console.print(_make_table([[row[index] for index in block] for row in cells], [columns[i] for i in block]))


def _print_plain(cells: list[list[str]], columns: list[str]) -> None:
    """Write a table to a file or another program; no line is wrapped, and thousands of rows take no time."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padding = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        is_number = [column.startswith(">") for column in columns]
        lines.append("  ".join(p + c if right else c + p for c, p, right in zip(row, padding, is_number, strict=True)))
    lines.insert(1, "─" * (sum(widths) + _GAP * (len(widths) - 1)))
    typer.echo("\n".join(lines))


def _least_width(cells: list[Text], is_fixed: bool) -> int:
    """Return the minimum width of a column: its longest cell, or the longest word if it is wrapped."""
    words = (word for cell in cells for word in ([cell] if is_fixed else cell.split()))
    return max((word.cell_len for word in words), default=0)


def _divide_columns(widths: list[int], available: int) -> list[list[int]]:
    """Divide the columns into tables that fit into a width, each with the first column; return their indices."""
    blocks = [[0]]
    for index in range(1, len(widths)):
        together = [*blocks[-1], index]
        fits = sum(widths[one] for one in together) + _GAP * (len(together) - 1) <= available
        if fits or len(together) == 2:
            blocks[-1] = together
        else:
            blocks.append([0, index])
    return blocks


def _make_table(cells: list[list[Text]], columns: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    headings, *rows = cells
    for index, heading in enumerate(headings):
        is_number = columns[index].startswith(">")
        justify: Any = "right" if is_number else "left"
        table.add_column(heading, justify=justify, no_wrap=is_number or index == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def pairs(entries: Mapping[str, Any]) -> str:
    """Return ``a=1, b=2``."""
    return ", ".join(f"{name}={value!r}" for name, value in entries.items())


def describe_size(size_bytes: int) -> str:
    """Return a number of bytes as three digits and a unit."""
    size = float(size_bytes)
    *units, largest = ["B", "kB", "MB", "GB", "TB"]
    for unit in units:
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {largest}"


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
