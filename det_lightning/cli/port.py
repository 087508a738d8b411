"""``det-lightning port``: rewrite a project, or write a trial as a LightningModule; needs libcst and PyYAML to run."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib.util
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from det_lightning.cli.arguments import JsonFlag, output_file
from det_lightning.cli.output import print_json, print_lines, report_errors, warn
from det_lightning.escaping import escape
from det_lightning.extras import how_to_install
from det_lightning.porting import Severity, port_paths

if TYPE_CHECKING:
    from det_lightning.porting import FilePort
    from det_lightning.porting.to_lightning import WrittenModule

EXIT_CODES = "Exit codes: 0 success; 1 with --check, if something would change or is left to do; 2 wrong usage."
_REQUIRED = ("libcst", "yaml")
_AGGREGATION = re.compile(r"^\s*aggregation_frequency:\s*(\w+)", re.MULTILINE)
_COLORS = {"+++": "bold", "---": "bold", "@@": "cyan", "+": "green", "-": "red"}


class Target(str, enum.Enum):
    """What ``port`` writes."""

    det_lightning = "det_lightning"
    lightning = "lightning"


@report_errors()
def port(
    paths: Annotated[
        list[pathlib.Path],
        typer.Argument(metavar="PATH...", help="Files, and directories with files, of a project.", show_default=False),
    ],
    diff: Annotated[bool, typer.Option("--diff", help="Only show what would change. The default.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if there is something to change or to do.")
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

    What cannot be rewritten is listed with what to do about it, unless its line has the comment `# det-lightning: ok`.
    """
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"The porting tool needs {' and '.join(missing)}: {how_to_install('port')}.")
    if to is Target.lightning:
        if diff or write or check or json:
            raise ValueError("--to lightning writes a new file; --diff, --write, --check and --json do not go with it.")
        _write_lightning_module(paths, output, force)
        return
    if output is not None or force:
        raise ValueError("--output and --force go with --to lightning only; --write changes the files in place.")
    if write and (check or diff):
        raise ValueError(f"--write changes files and --{'check' if check else 'diff'} does not: give one of them.")
    if not _port_project(paths, write, diff or not (write or check), json) and check:
        raise typer.Exit(1)


def _port_project(paths: list[pathlib.Path], write: bool, diff: bool, as_json: bool) -> bool:
    """Port the files below ``paths``; return whether nothing is left to change or to do."""
    ports = port_paths(paths)
    if write:
        ports = [_written(port) for port in ports]
    changed = [port for port in ports if port.changed and (port.may_be_written or not write)]
    if as_json:
        print_json({"files": [_as_json(port, diff) for port in ports]})
    else:
        if diff:
            _print_diff(changed)
        elif changed:
            print_lines(f"{'ported' if write else 'to port'}: {port.path}" for port in changed)
        _print_findings(ports)
        _print_summary(ports, paths, len(changed), written=write)
    left = any(finding.severity is not Severity.note for port in ports for finding in port.findings)
    return not left and not changed


def _written(port: FilePort) -> FilePort:
    """Write a file that changes; return it, with a finding if that fails."""
    if port.changed and port.may_be_written:
        try:
            port.write()
        except OSError as e:
            return port.not_written(str(e), "make the file and its directory writable")
    return port


def _as_json(port: FilePort, with_diff: bool) -> dict[str, Any]:
    findings = [
        {"line": found.line, "level": found.severity.value, "reason": found.reason, "advice": found.advice}
        for found in port.findings
    ]
    content = {"path": str(port.path), "changed": port.changed, "may_be_written": port.may_be_written}
    diff = {"diff": "".join(_diff_lines(port))} if with_diff else {}
    return {**content, "findings": findings, **diff}


def _diff_lines(port: FilePort) -> Iterator[str]:
    before = port.before.splitlines(keepends=True)
    after = port.after.splitlines(keepends=True)
    # A name with a line break in it would end the header, and could add lines to the patch.
    name = escape(port.path)
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _print_diff(changed: list[FilePort]) -> None:
    if not sys.stdout.isatty():
        # Bytes, so that line endings are kept and the output is a patch.
        for port in changed:
            sys.stdout.buffer.write("".join(_diff_lines(port)).encode(port.encoding, "replace"))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for port in changed:
        for line in _diff_lines(port):
            style = next((color for prefix, color in _COLORS.items() if line.startswith(prefix)), "")
            shown = "\t".join(escape(part) for part in line.rstrip("\r\n").split("\t"))
            console.print(Text(shown, style=style))


def _print_findings(ports: list[FilePort]) -> None:
    for port in ports:
        for found in port.findings:
            position = f"{escape(port.path)}:{found.line}" if found.line else escape(port.path)
            warn(f"{position}: {found.severity.value}: {found.reason}")
            warn(f"→ {found.advice}.")


def _print_summary(ports: list[FilePort], paths: list[pathlib.Path], changed: int, written: bool) -> None:
    if not ports:
        names = ", ".join(map(escape, paths))
        warn(f"Nothing to port: nothing in {names} uses determined in a way that must change.")
        return
    counts = Counter(found.severity for port in ports for found in port.findings)
    parts = [f"{counts[kind]} {kind.value}{'s' if counts[kind] > 1 else ''}" for kind in Severity if counts[kind]]
    left = f"left to you: {', '.join(parts)}" if parts else "nothing is left for you to do"
    warn(f"{changed} file{'' if changed == 1 else 's'} {'changed' if written else 'to change'}; {left}.")


def _write_lightning_module(paths: list[pathlib.Path], output: pathlib.Path | None, force: bool) -> None:
    """Write the trial of a file as a LightningModule, to another file or to the standard output."""
    if len(paths) != 1:
        raise ValueError(f"--to lightning takes one file with one trial; got {len(paths)} paths.")
    (path,) = paths
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    written = _converted(path)
    if output is None:
        sys.stdout.write(written.text)
    else:
        if output.is_symlink():
            raise ValueError(f"{output} is a link to {output.resolve()}; name that file itself.")
        output_file(str(output), force).write_text(written.text, encoding="utf-8")
    for todo in written.todos:
        warn(f"{'line ' if output is None else f'{escape(output)}:'}{todo.line}: TODO: {todo.text}")
    count = len(written.todos)
    warn(f"{count} TODO comment{'' if count == 1 else 's'} to look at." if count else "Nothing is left to do.")
    warn("This trains, with values in place of the dots:")
    for line in written.program("module" if output is None else output.stem).splitlines():
        typer.echo(line, err=True)


def _converted(path: pathlib.Path) -> WrittenModule:
    import libcst

    from det_lightning.porting.separate_process import PortingFailed, PortingProcess
    from det_lightning.porting.to_lightning import NoTrialError, write_module

    try:
        with PortingProcess() as process:
            port = process.port(path)  # a file that would crash this process crashes that one
        written = write_module(path.read_text(encoding="utf-8-sig"), _aggregating_configuration(path))
    except (PortingFailed, RecursionError) as e:
        raise ValueError(f"{path} cannot be read: {e}.") from e
    except libcst.ParserSyntaxError as e:
        raise ValueError(f"{path} is not Python 3: line {e.raw_line}: {e.message}.") from e
    except NoTrialError as e:
        raise ValueError(f"{path} cannot be written as a LightningModule: {e}.") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not encoded as UTF-8.") from e
    _print_findings([dataclasses.replace(port, findings=[f for f in port.findings if f.severity is not Severity.note])])
    return written


def _aggregating_configuration(path: pathlib.Path) -> str:
    """Return the name of a configuration beside a trial that aggregates gradients over batches, if there is one."""
    for file in sorted([*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")]):
        found = _AGGREGATION.search(file.read_text(encoding="utf-8", errors="replace"))
        if found is not None and found.group(1) != "1":
            return file.name
    return ""
