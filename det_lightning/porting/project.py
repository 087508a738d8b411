"""The files of a project: finding, porting and judging them together. Nothing is written through links."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

from det_lightning.files.file_kinds import require_file
from det_lightning.porting.counterparts import read_methods
from det_lightning.porting.entry_points import EntryPoint, FileGraph, find_entry_points, find_needs, shorten
from det_lightning.porting.facts import Facts, Read
from det_lightning.porting.file_port import OF_CI, FilePort, is_portable, port_file
from det_lightning.porting.findings import Finding, Need, Premise, Severity
from det_lightning.porting.library_names import check_libraries
from det_lightning.startup_hook import is_accepted

_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}
# Every kind of virtual environment has one of these files.
_OF_ENVIRONMENTS = ("pyvenv.cfg", "bin/activate", "Scripts/activate", "conda-meta")
# The files of a checkpoint of any release, or of an experiment of det-lightning run: copies of code in such directories
# belong to finished trainings.
_RECORDS = (
    ("metadata.json", "state_dict.pth"),
    ("load_data.json", "state_dict.pth"),
    ("metadata.json", "checkpoint.pt"),
    ("determined/state_dict.pth",),
    ("pedl/state_dict.pth",),
    ("events.jsonl", "config.json"),
)
_GIVE = "add it, or let the code read it with a default"
# Advice for a file that imports an unchanged file.
_OF_A_MIXTURE = (
    "change that file; or leave both on Determined, and name the paths to port, as in det-lightning port DIR FILE"
)


def find_files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return all portable files below ``paths``, without duplicates and without directories such as ``.git``.

    Raises FileNotFoundError for missing paths, and ValueError for files of other kinds.
    """
    given = list(paths)
    missing = [str(path) for path in given if not path.exists()]
    if missing:
        raise FileNotFoundError(f"There is no file or directory {', '.join(missing)}.")
    for path in given:
        if not path.is_dir():
            require_file(path)
    other = [str(path) for path in given if path.is_file() and not is_portable(path)]
    if other:
        raise ValueError(
            f"{', '.join(other)}: not a kind of file that can be ported. The kinds are Python, notebooks, YAML, "
            "shell scripts, Makefiles, Dockerfiles, requirements, pyproject.toml, setup.cfg, tox.ini and Pipfile."
        )
    return list(dict.fromkeys(file for path in given for file in walk_files(path) if _is_own_file(file, path)))


def walk_files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a file itself, or the files below a directory, without installed, built and recorded files."""
    if path.is_file():
        yield path
    for directory, names, files in os.walk(path):
        names[:] = sorted(name for name in names if not _is_skipped(pathlib.Path(directory, name)))
        yield from (file for name in sorted(files) if (file := pathlib.Path(directory, name)).is_file())


def _is_own_file(file: pathlib.Path, given: pathlib.Path) -> bool:
    """Return whether to port a file below a given path: not a link into the project, whose target is found anyway."""
    is_inner_link = file.is_symlink() and file.resolve().is_relative_to(given.resolve())
    return file == given or (is_portable(file) and not is_inner_link)


def _is_skipped(directory: pathlib.Path) -> bool:
    """Return whether a directory holds no code of a project: hidden, installed, built, or recorded by a run."""
    name = directory.name
    hidden = name.startswith(".") and name not in OF_CI
    if hidden or name in _SKIPPED or name.endswith(".egg-info"):
        return True
    is_environment = any((directory / name).exists() for name in _OF_ENVIRONMENTS)
    return is_environment or any(all((directory / name).is_file() for name in names) for names in _RECORDS)


@dataclasses.dataclass(frozen=True)
class ProjectPort:
    """The ported files and the entry points below some paths."""

    files: list[FilePort]  # changed files, and files with findings
    entry_points: list[EntryPoint]  # everything to start there
    unchecked: list[str] = dataclasses.field(default_factory=list)  # what was not checked, as sentences


def port_project(paths: Iterable[pathlib.Path]) -> ProjectPort:
    """Port all files below ``paths``, without writing.

    The result is empty if there are only hints: such files have nothing to do with Determined.
    """
    with _without_working_directory():
        ported = [_port(file) for file in find_files(paths)]
        if not any(_is_of_determined(port) for port in ported):
            return ProjectPort([], [])
        noted = _note_missing_values(FileGraph(_note_unchanged_imports(FileGraph(ported))))
        checked, unchecked = check_libraries(noted)
    kept = _without_pointless_findings(FileGraph(checked))
    shown = [port for port in kept if port.changed or port.findings]
    return ProjectPort(shown, find_entry_points(FileGraph(kept)), unchecked)


@contextlib.contextmanager
def _without_working_directory() -> Iterator[None]:
    """Import nothing from the working directory in the block: it may be the project."""
    before = list(sys.path)
    here = pathlib.Path.cwd()
    sys.path[:] = [entry for entry in before if entry and pathlib.Path(entry).resolve() != here]
    try:
        yield
    finally:
        sys.path[:] = before


def _port(path: pathlib.Path) -> FilePort:
    try:
        port = port_file(path)
    except Exception as e:  # a failure of one file must not stop the others
        advice = "port it by hand, or make it readable first"
        return FilePort(path, "", "", [Finding(0, Severity.problem, f"not ported: {type(e).__name__}: {e}", advice)])
    if not port.changed:
        return port
    if path.is_symlink():
        return port.refuse_writing(f"it is a link to {path.resolve()}", "name that file itself")
    # An administrator may write even to write-protected files.
    if not path.stat().st_mode & stat.S_IWUSR or not os.access(path, os.W_OK):
        return port.refuse_writing("it is read-only", "make it writable first")
    return port


def _is_of_determined(port: FilePort) -> bool:
    hints = all(finding.severity is Severity.check for finding in port.findings)
    return port.changed or not hints or port.is_configuration or "det_lightning" in port.before


def _note_unchanged_imports(graph: FileGraph) -> list[FilePort]:
    """Add a finding to each ported file that imports a file that stays unchanged."""
    noted = []
    for port in graph.ports.values():
        is_ported = port.facts.uses_determined and not port.is_configuration and not find_needs(port, Need.file)
        imported = graph.find_direct_imports(port) if is_ported else []
        needs = [reason for file in imported for reason in find_needs(file, Need.file)[:1]]
        found = [Finding(0, Severity.problem, f"it imports {need}", _OF_A_MIXTURE) for need in needs]
        noted.append(dataclasses.replace(port, findings=sorted([*port.findings, *found])))
    return noted


def _note_missing_values(graph: FileGraph) -> list[FilePort]:
    """Add a problem to the files for each value that a configuration lacks and its code reads."""
    noted = []
    for port in graph.ports.values():
        found = [
            Finding(given.line or 0, Severity.problem, f"no {read.name} in {given.section}: {where} reads it", _GIVE)
            for given in port.facts.given
            for where, read in _find_reads(graph, port)
            if read.section == given.section and read.name not in given.names
        ]
        noted.append(dataclasses.replace(port, findings=sorted({*port.findings, *found})))
    return noted


def _find_reads(graph: FileGraph, configuration: FilePort) -> Iterator[tuple[str, Read]]:
    """Yield the values that the trial class or script of a configuration reads in any case, and where."""
    files = graph.find_reached(configuration)[1:]
    started = graph.find_started(configuration)
    own = {name.partition(":")[2] for name in configuration.facts.classes}
    lineage = [*own]
    for name in lineage:  # grows
        bases = [base for file in files for derived, base in file.facts.bases if derived == name]
        lineage += [base for base in dict.fromkeys(bases) if base not in lineage]
    # Determined calls these in any case; the last two belong to trials before 0.12.13.
    called = {"", *read_methods("_pytorch_trial.py", "PyTorchTrial"), "build_model", "optimizer"}
    for file in files:
        # A script may give hyperparameters itself.
        is_script = file in started and "hparams=" not in file.before
        for read in file.facts.reads:
            is_inherited = read.owner in lineage and read.function == "__init__"
            is_called = read.owner in own and read.function in called
            is_read = is_called or is_inherited or (is_script and not read.owner)
            if is_read and not is_accepted(file.before.splitlines()[read.line - 1]):
                yield f"{shorten(file.path)}:{read.line}", read


def _without_pointless_findings(graph: FileGraph) -> list[FilePort]:
    """Remove the findings that other files of the project disprove."""
    configurations: defaultdict[pathlib.Path, list[Facts]] = defaultdict(list)
    users: defaultdict[pathlib.Path, list[Facts]] = defaultdict(list)
    for port in graph.ports.values():
        if port.is_configuration:
            for reached in graph.find_reached(port):
                configurations[reached.path].append(port.facts)
        elif port.facts.uses_determined:
            for imported in graph.find_imports(port):
                users[imported.path].append(port.facts)
    needs = any(find_needs(port, Need.file, Need.script) for port in graph.ports.values())
    kept = []
    for port in graph.ports.values():
        around = (configurations[port.path], users[port.path], needs)
        kept.append(dataclasses.replace(port, findings=[one for one in port.findings if _is_relevant(one, *around)]))
    return kept


def _is_relevant(finding: Finding, configurations: list[Facts], users: list[Facts], needs_determined: bool) -> bool:
    """Return whether a finding still holds, given the configurations and the users of its module.

    ``needs_determined`` says whether any file of the project needs Determined.
    """
    if finding.premise is Premise.unneeded:
        return not needs_determined
    if finding.premise is Premise.by_hand:
        return not configurations
    if finding.premise in (Premise.in_trial, Premise.outside_trial):
        moving = [user.apis for user in users if not user.imports_determined]
        is_in_trial = any("pytorch" in apis for apis in moving)
        return is_in_trial or not users if finding.premise is Premise.in_trial else bool(moving) and not is_in_trial
    return True
