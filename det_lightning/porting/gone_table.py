"""The table of names removed from today's libraries: ``gone_names.csv``, with a description in the first lines."""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

from det_lightning.porting.findings import Severity

_FILE = pathlib.Path(__file__).with_name("gone_names.csv")
_NAME = re.compile(r"(?P<path>[^(]+)(?:\((?P<before>(?:\w+, )*)(?P<argument>[^)]*)\))?")
_RELEASE = re.compile(r"(?P<library>\S+) (?P<release>[\d.]+)")


@dataclasses.dataclass(frozen=True)
class GoneName:
    """A row of the table, with patterns for the name."""

    name: str
    gone: str
    replacement: str
    advice: str
    severity: Severity
    path: re.Pattern[str]
    word: re.Pattern[str]  # the last part of the path, or the keyword; present in every text with the name
    given: str  # the removed attribute or argument as in the table; empty for a removed name
    keyword: str  # only calls of the method with this argument fail; empty for all calls
    before: int  # the number of arguments before, for an argument by position; else 0

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def is_attribute(self) -> bool:
        return self.given.startswith((".", "=."))

    @property
    def still_exists(self) -> bool:
        """Whether the name still exists and only the described use of the name fails."""
        return _RELEASE.fullmatch(self.gone) is None

    def holds(self, lack: Callable[[str, str], bool]) -> bool:
        """Return whether the name is missing in a project; ``lack`` compares releases."""
        release = _RELEASE.fullmatch(self.gone)
        return release is None or lack(release["library"], release["release"])

    def reason(self, shown: str) -> str:
        return f"{shown} {self.gone}" if self.still_exists else f"{shown} is gone since {self.gone}"


@functools.cache
def read_table() -> tuple[GoneName, ...]:
    """Return the rows of the table."""
    lines = [line for line in _FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return tuple(_row(**row) for row in csv.DictReader(lines))


def _row(name: str, gone: str, replacement: str, advice: str, level: str) -> GoneName:
    found = _NAME.fullmatch(name)
    assert found is not None, f"{name} is written as the first lines of the table say"
    given = found["argument"] or ""
    attribute, _, keyword = given.partition(", ") if "." in given[:2] else (given, "", "")
    is_word = attribute.startswith(("=.", ".", "'")) or (attribute.endswith("=") and not attribute.startswith("!"))
    word = attribute.strip("'-.=") if is_word else found["path"].rpartition(".")[2]
    patterns = _pattern(found["path"]), _pattern(word)
    before = (found["before"] or "").count(",")
    severity = Severity(level or "problem")
    return GoneName(name, gone, replacement, advice, severity, *patterns, attribute, keyword.removesuffix("="), before)


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern for a name of the table: ``..`` is any modules, ``*`` any letters, ``{a,b}`` a or b."""
    text = text.replace("*", r"\w*").replace("..", "\0").replace(".", r"\.").replace("\0", r"\.(?:\w+\.)*")
    return re.compile(re.sub(r"{(.*?)}", lambda found: f"({found[1].replace(',', '|')})", text))


def find_rows(package: str) -> list[GoneName]:
    """Return the rows about a package."""
    return [row for row in read_table() if row.package == package]


def option_rows() -> list[GoneName]:
    """Return the rows about options: keywords that are also attributes, options of programs and hyperparameters."""
    return [row for row in read_table() if row.given.startswith("--")]


def find_packages(text: str) -> list[str]:
    """Return the packages of the table mentioned in a text."""
    return sorted({row.package for row in read_table()}.intersection(re.findall(r"\w+", text)))


def mentions_gone_name(text: str, packages: list[str]) -> bool:
    """Return whether a text has a word from a removed name of ``packages``."""
    return any(_words(package).search(text) for package in packages)


@functools.cache
def _words(package: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(row.word.pattern for row in find_rows(package))})\b")
