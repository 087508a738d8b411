"""The releases of libraries a project runs with: the installed release, or else the newest allowed by the project."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from det_lightning.porting.findings import Finding, Premise, Severity, line_at

_PIN = re.compile(
    r"(?<![\w./-])([A-Za-z][\w.-]*)(?:\[[\w, -]*\])?[ \t]*\(?((?:[<>=!~]=?=?[ \t]*\d[\w.*]*[ \t]*,?[ \t]*)+)"
)
# Older and newer than all releases.
_ANY = (Version("0"), Version("99999"))


@dataclasses.dataclass(frozen=True)
class Libraries:
    """The libraries of a project, as told by its files. A library without a pin counts as the newest release.

    The files also tell the names defined by the project itself.
    """

    pins: dict[str, str] = dataclasses.field(default_factory=dict)  # by the names of distributions
    imported: frozenset[str] = frozenset()  # top-level modules from outside of the project
    shadowed: frozenset[str] = frozenset()  # top-level modules from inside of the project only
    takes_options: bool = False  # something is given the options of transformers
    own: frozenset[str] = frozenset()  # options read by Python files, or known by both names
    defined: frozenset[str] = frozenset()  # the functions and methods of the project
    trainers: frozenset[str] = frozenset()  # classes of the project with a Trainer's arguments
    taken: frozenset[str] = frozenset({"*"})  # names imported from modules of the project; * for any

    def lack(self, library: str, release: str) -> bool:
        """Return whether the project runs with ``release`` of a library or a later release."""
        gone = Version(release)
        name = normalize(library)
        if name == "python":
            return Version("{}.{}".format(*sys.version_info)) >= gone
        if (installed := _find_installed(name)) is not None:
            return installed >= gone
        ours = _read_required().get(name, SpecifierSet())
        # A pin outside of det_lightning's own requirements must change anyway, and does not count.
        for allowed in (ours & _specifiers(self.pins.get(name, "")), ours):
            if found := _releases(allowed, gone):
                return max(found) >= gone
        return True


#: The libraries of an unknown project.
UNKNOWN = Libraries()


def find_pins(text: str) -> Iterator[re.Match[str]]:
    """Yield the requirements in a file, except in comments."""
    for found in _PIN.finditer(text):
        before = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if re.search(r"(?:^|\s)#", before) is None:
            yield found


def note_pins(text: str) -> list[Finding]:
    """Return findings for requirements that exclude every release allowed by det_lightning."""
    findings = []
    for found in find_pins(text):
        ours = _read_required().get(normalize(found[1]), SpecifierSet())
        if not _releases(ours & _specifiers(found[2])):
            pinned = found.group().strip()
            reason = f"{pinned} is not a release that det-lightning works with ({found[1]}{ours})"
            line = line_at(text, found.start())
            advice = "allow a later release"
            findings.append(Finding(line, Severity.check, reason, advice, premise=Premise.unneeded))
    return findings


def _releases(allowed: SpecifierSet, *others: Version) -> list[Version]:
    """Return the allowed releases among the ones to compare, including all releases named by the specifiers."""
    named = [Version(one.version.removesuffix(".*")) for one in allowed]
    return [one for one in (*_ANY, *others, *named) if allowed.contains(one, prereleases=True)]


def normalize(name: str) -> str:
    """Return the normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _specifiers(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text.strip(" ,"))
    except InvalidSpecifier:
        return SpecifierSet()


@functools.cache
def _find_installed(name: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _read_required() -> dict[str, SpecifierSet]:
    """Return the requirements of det_lightning, with all extras."""
    try:
        lines = importlib.metadata.requires("det-lightning") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone without installation
        lines = []
    return {normalize(one.name): one.specifier for one in map(Requirement, lines)}
