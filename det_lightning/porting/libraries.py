"""Which releases of libraries a project runs with: those that are installed, else those that its files allow."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Sequence

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from det_lightning.porting.findings import Finding, Premise, Severity, line_at

_PIN = re.compile(
    r"(?<![\w./-])([A-Za-z][\w.-]*)(?:\[[\w, -]*\])?[ \t]*\(?((?:[<>=!~]=?=?[ \t]*\d[\w.*]*[ \t]*,?[ \t]*)+)"
)
_IMPORT = re.compile(r"^[ \t\"]*(?:from|import)[ \t]+(\w[^\n]*)", re.MULTILINE)
_FROM = re.compile(r"^[ \t\"]*from[ \t]+\.*([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
# A class without an __init__ of its own that has the argument.
_TRAINER = re.compile(
    r"^class (\w+)\((?:[\w.]+, *)*(?:transformers\.)?(?:Seq2Seq)?Trainer\b.*\n(?!(?:[ \t]+.*\n|\n)*?"
    r"[ \t]+def __init__\([^)]*\btokenizer\b)",
    re.MULTILINE,
)
# How a program reads an option or a hyperparameter itself, rather than a class of a library.
_OWN = re.compile(r"[\"'](?:--)?(\w+)[\"']|(?<!args)\.(\w+)\b(?!\s*\()|^\s+(\w+)\s*:", re.MULTILINE)
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
    imported: frozenset[str] = frozenset()  # the packages that Python files import
    own: frozenset[str] = frozenset()  # the options that Python files read themselves
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
    imported: set[str] = set()
    own: set[str] = set()
    trainers: set[str] = set()
    taken: set[str] = set() if is_whole else {"*"}
    modules = {file.stem for file in files} | {file.parent.name for file in files}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < _MOST_BYTES else ""
        except OSError:  # whatever ports the file says so
            continue
        if file.suffix in _CODE:
            imported.update(word for line in _IMPORT.findall(text) for word in re.findall(r"\w+", line))
            own.update(word for words in _OWN.findall(text) for word in words)
            trainers.update(_TRAINER.findall(text))
            ours = [
                names for module, names in _FROM.findall(text) if not module or module.rpartition(".")[2] in modules
            ]
            taken.update(word for names in ours for word in re.findall(r"[\w*]+", names))
        if file.suffix not in _CODE or file.name == "setup.py":
            pins.update((_normal(name), specifiers) for name, specifiers in _PIN.findall(text))
    return Libraries(pins, frozenset(imported), frozenset(own), frozenset(trainers), frozenset(taken))


def note_pins(text: str) -> list[Finding]:
    """Return findings for the requirements in a file that no release fulfills that det_lightning allows."""
    findings = []
    for found in _PIN.finditer(text):
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
