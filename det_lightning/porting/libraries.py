"""Which releases of libraries a project runs with: those that are installed, else those that its files allow."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from det_lightning.porting.findings import Finding, Premise, Severity, line_at
from det_lightning.porting.gone_table import option_rows

_PIN = re.compile(
    r"(?<![\w./-])([A-Za-z][\w.-]*)(?:\[[\w, -]*\])?[ \t]*\(?((?:[<>=!~]=?=?[ \t]*\d[\w.*]*[ \t]*,?[ \t]*)+)"
)
_IMPORT = re.compile(r"^[ \t\"]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import|import[ \t]+(\w[^\n#;]*))", re.MULTILINE)
_FROM = re.compile(r"^[ \t\"]*from[ \t]+\.*([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
# A class without an __init__ of its own that has the argument.
_TRAINER = re.compile(
    r"^class (\w+)\((?:[\w.]+, *)*(?:transformers\.)?(?:Seq2Seq)?Trainer\b.*\n(?!(?:[ \t]+.*\n|\n)*?"
    r"[ \t]+def __init__\([^)]*\btokenizer\b)",
    re.MULTILINE,
)
# How a program defines or reads an option or a hyperparameter itself, rather than a class of a library.
_OWN = re.compile(
    r"[\"'](?:--)?([\w-]+)[\"'](?!\s*:)|(?<!args)\.(\w+)\b(?!\s*\()|^\s+(\w+)\s*:|\bdef\s+\w+\(([^)]*)\)", re.MULTILINE
)
_DEFINED = re.compile(r"\bdef\s+(\w+)\(")
# What takes the options of transformers, or is derived from it.
_TAKES_OPTIONS = re.compile(
    r"TrainingArguments\b|\bHfArgumentParser\b|^[ \t\"]*(?:from|import)[ \t]+trl\b", re.MULTILINE
)
_ALIAS = re.compile(r"\b(\w+)[ \t]+as[ \t]+(\w+)")
_ATTRIBUTE = re.compile(r"\b(\w+)(?=\.(\w+))")
_CODE = (".py", ".ipynb")
_MOST_BYTES = 4 * 1024 * 1024
# No release at all, and one that is newer than all.
_ANY = (Version("0"), Version("99999"))


@dataclasses.dataclass(frozen=True)
class Libraries:
    """The libraries of a project, as far as its files tell; whatever they do not pin is the newest release.

    The files also tell which names belong to the project itself.
    """

    pins: dict[str, str] = dataclasses.field(default_factory=dict)  # by the names of distributions
    imported: frozenset[str] = frozenset()  # the top-level modules that Python files import from elsewhere
    shadowed: frozenset[str] = frozenset()  # those that they import from the project, and never from elsewhere
    takes_options: bool = False  # something is given the options of transformers
    own: frozenset[str] = frozenset()  # such options that Python files read themselves, or know by both names
    defined: frozenset[str] = frozenset()  # the functions and methods of the project
    trainers: frozenset[str] = frozenset()  # classes of the project that take what a Trainer of transformers takes
    taken: frozenset[str] = frozenset({"*"})  # the names that files import from modules of the project; * for any

    def lack(self, library: str, release: str) -> bool:
        """Return whether the release of ``library`` that the project runs with is ``release`` or a later one."""
        gone = Version(release)
        name = _normal(library)
        if name == "python":
            return Version("{}.{}".format(*sys.version_info)) >= gone
        if (installed := _installed(name)) is not None:
            return installed >= gone
        ours = _required().get(name, SpecifierSet())
        # A pin that det_lightning itself does not allow must change, and so says nothing.
        for allowed in (ours & _specifiers(self.pins.get(name, "")), ours):
            if found := _releases(allowed, gone):
                return max(found) >= gone
        return True


def read_libraries(files: Sequence[pathlib.Path], *, is_whole: bool = True) -> Libraries:
    """Return what the files of a project say about libraries; unless they are the whole project, names may be taken."""
    pins: dict[str, str] = {}
    found: defaultdict[str, set[str]] = defaultdict(set)
    takes_options = False
    modules = {file.stem for file in files} | {file.parent.name for file in files}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < _MOST_BYTES else ""
        except OSError:  # whatever ports the file says so
            continue
        if file.suffix in _CODE:
            takes_options = takes_options or _TAKES_OPTIONS.search(text) is not None
            imported = _imported_by(text)
            for module in imported:
                found["shadowed" if _is_beside(file, module) else "imported"].add(module)
            found["own"] |= _own_options(text)
            found["defined"].update(_DEFINED.findall(text))
            found["trainers"].update(_TRAINER.findall(text) if "transformers" in imported else ())
            found["taken"] |= _taken_by(text, modules)
        if file.suffix not in _CODE or file.name == "setup.py":
            pins.update((_normal(pin[1]), pin[2]) for pin in _pins_in(text))
    if not is_whole:
        found["taken"].add("*")
    found["shadowed"] -= found["imported"]
    sets = {field: frozenset(found[field]) for field in ("imported", "shadowed", "own", "defined", "trainers", "taken")}
    return Libraries(pins, takes_options=takes_options and "transformers" in found["imported"], **sets)


def _imported_by(text: str) -> set[str]:
    """Return the top-level modules that code imports."""
    tops = [top for top, _ in _IMPORT.findall(text)]
    tops += [
        part.strip().partition(".")[0].split(" ")[0] for _, parts in _IMPORT.findall(text) for part in parts.split(",")
    ]
    return {top for top in tops if top.isidentifier()}


def _is_beside(file: pathlib.Path, module: str) -> bool:
    """Return whether a file finds a module in its own project."""
    roots = [directory for directory in file.parents if not (directory / "__init__.py").is_file()]
    return any((root / name).is_file() for root in roots for name in (f"{module}.py", f"{module}/__init__.py"))


def _own_options(text: str) -> set[str]:
    """Return the options that code defines or reads itself, and those that it knows by their old and new names."""
    words = {
        word.replace("-", "_") for found in _OWN.findall(text) for part in found for word in re.findall(r"[\w-]+", part)
    }
    both = {
        found.group()
        for row in option_rows()
        for found in row.word.finditer(text)
        if row.replacement and re.search(rf"\b{found.expand(row.replacement)}\b", text)
    }
    return both | {word for word in words if any(row.word.fullmatch(word) for row in option_rows())}


def _taken_by(text: str, modules: set[str]) -> set[str]:
    """Return the names that code takes from modules of the project, by an import or as their attributes."""
    lists = [names for module, names in _FROM.findall(text) if not module or module.rpartition(".")[2] in modules]
    known = modules | {alias for module, alias in _ALIAS.findall(text) if module in modules}
    attributes = {name for module, name in _ATTRIBUTE.findall(text) if module in known}
    return attributes | {word for names in lists for word in re.findall(r"[\w*]+", names)}


def _pins_in(text: str) -> Iterator[re.Match[str]]:
    """Yield the requirements in a file, without those in comments."""
    for found in _PIN.finditer(text):
        before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if re.search(r"(?:^|\s)#", before) is None:
            yield found


def note_pins(text: str) -> list[Finding]:
    """Return findings for the requirements in a file that no release fulfills that det_lightning allows."""
    findings = []
    for found in _pins_in(text):
        ours = _required().get(_normal(found[1]), SpecifierSet())
        if not _releases(ours & _specifiers(found[2])):
            pinned = found.group().strip()
            reason = f"{pinned} is not a release that det-lightning works with ({found[1]}{ours})"
            line = line_at(text, found.start())
            advice = "allow a later release"
            findings.append(Finding(line, Severity.check, reason, advice, premise=Premise.unneeded))
    return findings


def _releases(allowed: SpecifierSet, *others: Version) -> list[Version]:
    """Return which of the releases that matter, those in the specifiers themselves included, are allowed."""
    named = [Version(one.version.removesuffix(".*")) for one in allowed]
    return [one for one in (*_ANY, *others, *named) if allowed.contains(one, prereleases=True)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _specifiers(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text.strip(" ,"))
    except InvalidSpecifier:
        return SpecifierSet()


@functools.cache
def _installed(name: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _required() -> dict[str, SpecifierSet]:
    """Return what det_lightning requires of other distributions, with all extras."""
    try:
        lines = importlib.metadata.requires("det-lightning") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone that is not installed
        lines = []
    return {_normal(one.name): one.specifier for one in map(Requirement, lines)}
