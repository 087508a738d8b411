"""``det-lightning port``: rewrite a project, or write a trial as a LightningModule. Needs the extra ``port``."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from det_lightning.cli.arguments import JsonFlag, output_file
from det_lightning.cli.output import print_json, print_lines, report_errors, warn
from det_lightning.files.file_kinds import require_output
from det_lightning.files.local_files import write_output
from det_lightning.missing_parts import explain_requirement, how_to_install

if TYPE_CHECKING:
    from det_lightning.porting import FilePort, ProjectPort
    from det_lightning.porting.to_lightning import WrittenModule

EXIT_CODES = (
    "Exit codes: 0 success; 1 with --check, if something would change, is left to do, or fails with --try; 2 wrong "
    "usage."
)
_REQUIRED = ("libcst", "ruff")
_REQUIREMENT = "det-lightning~="
_LIGHTNING = re.compile(r"^[ \t]*(?:import|from)[ \t]+(lightning|pytorch_lightning)\b", re.MULTILINE)
_AGGREGATION = re.compile(r"^\s*aggregation_frequency:\s*(\w+)", re.MULTILINE)


class Target(str, enum.Enum):
    """The result of ``port``."""

    det_lightning = "det_lightning"
    lightning = "lightning"


@report_errors()
def port(
    paths: Annotated[
        list[pathlib.Path],
        typer.Argument(metavar="PATH...", help="Files, and directories with files, of a project.", show_default=False),
    ],
    diff: Annotated[bool, typer.Option("--diff", help="Only show the changes (the default).")] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if there is something to change or to do.")
    ] = False,
    to: Annotated[
        Target, typer.Option(help="lightning: write a trial as a LightningModule without det_lightning.")
    ] = Target.det_lightning,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("--output", "-o", help="With --to lightning: the file to write; by default the standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file of --output.")] = False,
    report: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Also write a page (.html) on the finished and the remaining work."),
    ] = None,
    try_out: Annotated[
        bool,
        typer.Option("--try", help="Start each entry point that should run for a few batches, in a copy of the files."),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Port a Determined project: Python, notebooks, experiment files, shell scripts, Dockerfiles, requirements.

    The command lists everything that you must change yourself, with advice, except lines with the comment
    `# det-lightning: ok`.
    """
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"The porting tool needs {' and '.join(missing)}: {how_to_install('port')}.")
    if to is Target.lightning:
        if diff or write or check or json or report or try_out:
            raise ValueError(
                "--to lightning writes a new file; it cannot be used with --diff, --write, --check, --try, --report or "
                "--json."
            )
        _write_lightning_module(paths, output, force)
        return
    if output is not None or force:
        raise ValueError("--output and --force need --to lightning; --write changes the files in place.")
    if write and (check or diff):
        raise ValueError(f"--write changes files and --{'check' if check else 'diff'} does not: use only one.")
    if report is not None:
        require_output(report, (".html",))
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError(f"--report needs jinja2: {how_to_install('port')}.")
    project, is_done = _port_project(paths, write, diff or not (write or check), json, try_out)
    if report is not None:
        from det_lightning.porting.move_report import write_report

        write_report(report, project, written=write)
        warn(f"Wrote {report}.")
    if check and not is_done:
        raise typer.Exit(1)


def _port_project(
    paths: list[pathlib.Path], write: bool, diff: bool, as_json: bool, tries: bool
) -> tuple[ProjectPort, bool]:
    """Port the files below ``paths``; also return whether nothing is left to change or do."""
    from det_lightning.cli.port_output import print_diff, print_findings, print_summary, project_as_json
    from det_lightning.porting import Severity, port_project

    project = port_project(paths)
    if tries:
        from det_lightning.porting.smoke_run import try_project

        project = try_project(project, paths)
    if write:
        project = dataclasses.replace(project, files=[_write_file(port) for port in project.files])
    ports = project.files
    changed = [port for port in ports if port.changed and (port.may_be_written or not write)]
    if as_json:
        print_json(project_as_json(project, diff))
    else:
        if diff:
            print_diff(changed)
        elif changed:
            print_lines(f"{'ported' if write else 'to port'}: {port.path}" for port in changed)
        print_findings(ports)
        print_summary(project, paths, len(changed), written=write)
        hint = explain_requirement()
        if hint and any(_REQUIREMENT in port.after and _REQUIREMENT not in port.before for port in changed):
            warn(hint)
    left = any(finding.severity is not Severity.note for port in ports for finding in port.findings)
    left = left or any(entry.error for entry in project.entry_points)
    return project, not left and not changed


def _write_file(port: FilePort) -> FilePort:
    if port.changed and port.may_be_written:
        try:
            port.write()
        except OSError as e:
            return port.refuse_writing(str(e), "make the file and its directory writable")
    return port


def _write_lightning_module(paths: list[pathlib.Path], output: pathlib.Path | None, force: bool) -> None:
    """Write the trial in a file as a LightningModule, to another file or to standard output."""
    if len(paths) != 1:
        raise ValueError(f"--to lightning takes one file with one trial; got {len(paths)} paths.")
    (path,) = paths
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    written = _convert(path)
    if output is None:
        sys.stdout.write(written.text)
    else:
        if output.is_symlink():
            raise ValueError(f"{output} is a link to {output.resolve()}; name the target of the link.")
        write_output(output_file(str(output), force), written.text)
    for todo in written.todos:
        warn(f"{'line ' if output is None else f'{output}:'}{todo.line}: TODO: {todo.text}")
    count = len(written.todos)
    warn(f"{count} TODO comment{'' if count == 1 else 's'} to look at." if count else "Nothing is left to do.")
    warn("To train the module, with values in place of the dots:")
    for line in written.program("module" if output is None else output.stem).splitlines():
        warn(line)


def _convert(path: pathlib.Path) -> WrittenModule:
    import libcst

    from det_lightning.cli.port_output import print_findings
    from det_lightning.porting import Severity, port_file
    from det_lightning.porting.to_lightning import NoTrialError, write_module

    try:
        port = port_file(path)
        written = write_module(
            path.read_text(encoding="utf-8-sig"), _aggregating_configuration(path), _package_of_lightning(path)
        )
    except libcst.ParserSyntaxError as e:
        raise ValueError(f"{path} is not Python 3: line {e.raw_line}: {e.message}.") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not encoded as UTF-8.") from e
    except RecursionError as e:
        raise ValueError(f"{path} cannot be read: it is nested too deeply.") from e
    except NoTrialError as e:
        raise ValueError(f"{path} cannot be written as a LightningModule: {e}.") from e
    print_findings([dataclasses.replace(port, findings=[f for f in port.findings if f.severity is not Severity.note])])
    return written


def _aggregating_configuration(path: pathlib.Path) -> str:
    """Return the name of a configuration beside the trial that aggregates gradients, or an empty string."""
    for file in sorted([*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")]):
        found = _AGGREGATION.search(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
        if found is not None and found.group(1) != "1":
            return file.name
    return ""


def _package_of_lightning(path: pathlib.Path) -> str:
    """Return the package of Lightning that a file imports, or else the files beside and below it."""
    from det_lightning.porting.project import find_files

    for files in ([path], find_files([path.parent])):
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.suffix == ".py"]
        names = {name for text in texts for name in _LIGHTNING.findall(text)}
        if names:
            return "lightning.pytorch" if names == {"lightning"} else "pytorch_lightning"
    return "pytorch_lightning"
