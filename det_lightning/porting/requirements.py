"""Replaces Determined wherever a project lists requirements."""

from __future__ import annotations

import functools
import itertools
import re
import shlex

import det_lightning
from det_lightning.porting.findings import Finding, Premise, Severity, line_at

_NAME = "det-lightning"
_SPEC = r"(?P<spec>\s*\(?(?:===|[<>=!~]=?)\s*[^;#\s'\"]+(?:\s*,\s*[<>=!~]=?\s*[^;#\s'\"]+)*)?"
_REQUIREMENT = re.compile(rf"determined(?:\s*\[[^\]]*\])?{_SPEC}(?P<marker>\s*;.*)?", re.DOTALL | re.IGNORECASE)
_IN_LINE = re.compile(
    rf"(?P<before>^|[\s,\"'])determined(?:\[[^\]]*\])?{_SPEC.replace('[^;#', '[^;#&|)')}"
    r"(?!\s*@)(?P<after>$|(?=[\s\"';&|)\\]))"
)
# Not in a list of quoted words, separated by commas.
_QUOTED_IN_LINE = re.compile(rf"(?<!,)[ \t]([\"'])determined(?:\[[^\]]*\])?{_SPEC}\1")
_OURS = re.compile(rf"(?<![\w./-]){_NAME}[\w.~=]*(?![\w./-])")
# With options before the command, also in a list of quoted words.
_INSTALLER = r"\b(?:pip3?|pipenv|poetry|uv)\b(?:[\"',\s]+(?:pip|-[\w=-]+)){0,4}[\"',\s]+(?:install|add)\b"
_INSTALL = re.compile(rf"{_INSTALLER}(?:\\\r?\n|[^\n;&|#])*")
_GONE = r"(determined[-_](?:cli|common|deploy|sdk)|model[-_]hub)(?![\w-])"
_REQUIRED_USELESS = re.compile(rf"^[ \t]*{_GONE}", re.MULTILINE)
_INSTALLED_USELESS = re.compile(rf"(?<![\w./-]){_GONE}")
# A release or the repository of Determined; any other URL may have somebody's own version.
_RELEASE = (
    r"(?:(?:[^\s\"';]*/)?determined-\d[^\s\"';#]*\.(?:whl|zip|tar\.gz)(?:#[^\s\"';]*)?"
    r"|[^\s\"';]+/determined-ai/determined(?:\.git)?(?:[@#][^\s\"';]*)?)"
)
_AT = r"determined(?:\[[^\]]*\])?\s*@"
_URL = rf"(?:(?:-e|--editable)[ =]\s*)?(?:{_AT}\s*)?{_RELEASE}"
_BY_RELEASE = re.compile(rf"{_URL}(?P<marker>\s+;.*)?", re.DOTALL)
_BY_URL = re.compile(rf"^(?:(?:[^#\n]*[\[,])?[ \t]*[\"']?{_AT}|.*#egg=determined\b)", re.MULTILINE)
_URL_IN_LINE = re.compile(rf"(?<=[\s\"']){_URL}(?=$|[\s\"';&|)])", re.MULTILINE)
_INSTALL_BY_URL = re.compile(rf"{_INSTALLER}(?:\\\r?\n|(?!&&)[^\n;|])*")

_COMMENT = re.compile(r"(?<!\s)\s+#")
_WHOLE_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
# Options of pip install with a value; the first are lines of a requirements file too.
_LISTED = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-i", "--index-url", "--extra-index-url",
           "-f", "--find-links")  # fmt: skip
_WITH_VALUE = ("-t", "--target", "--prefix", "--root", "--trusted-host", "--timeout", "--progress-bar")
_KEYS = {"dependencies", "dev-dependencies", "requires", "install_requires", "tests_require", "setup_requires", "deps"}
_SECTIONS = ("optional-dependencies", "dependency-groups", "dev-dependencies", "extras_require")
_NAMED_SECTIONS = ("dependencies", "packages", "dev-packages")
_SOURCES = "tool.uv.sources"
_SOURCE = ("uv has a source for Determined", "remove it")
_TABLE = ("Determined is required by a table", f"require {_NAME} instead")
_SECTION = re.compile(r"\s*\[+([^\[\]]+)\]+\s*(?:#.*)?$")
_KEY = re.compile(r"(?P<indent>\s*)[\"']?(?P<key>[\w.-]+)[\"']?\s*[=:](?P<value>.*)$", re.DOTALL)
_VERSION = re.compile(r"^(\s*[\"']?)determined([\"']?\s*=\s*)(?:([\"'])(\*?)[^\"']*\3)(.*)$", re.DOTALL)
_QUOTED = re.compile(r"([\"'])(determined\b(?:(?!\1).)*)\1")


@functools.cache
def _compatible() -> str:
    """Return the version requirement, written so that a shell does not interpret it."""
    major, minor, *_ = det_lightning.__version__.split(".")
    return f"~={major}.{minor}"


def port_requirement(requirement: str) -> str | None:
    """Return the requirement to write instead of a requirement of Determined, or None for other packages."""
    requirement = requirement.strip()
    if found := _REQUIREMENT.fullmatch(requirement):
        return _NAME + (_compatible() if found["spec"] else "") + (found["marker"] or "")
    if found := _BY_RELEASE.fullmatch(requirement):
        return _NAME + (found["marker"] or "")
    return None


def port_installs(text: str) -> str:
    """Return shell commands with det_lightning installed in place of Determined."""

    def install(command: re.Match[str]) -> str:
        is_there = _OURS.search(command.group()) is not None
        text = _QUOTED_IN_LINE.sub("", command.group()) if is_there else command.group()

        def require(found: re.Match[str]) -> str:
            if is_there and found["before"].isspace():
                return ""
            return found["before"] + _NAME + (_compatible() if found["spec"] else "")

        return _IN_LINE.sub(require, text)

    without_urls = _INSTALL_BY_URL.sub(lambda command: _URL_IN_LINE.sub(_NAME, command.group()), text)
    return _INSTALL.sub(install, without_urls)


def list_installed(text: str) -> list[str]:
    """Return what shell commands install with pip, as lines of a requirements file."""
    found: list[str] = []
    for command in _INSTALL_BY_URL.finditer(_WHOLE_COMMENT.sub("", text)):
        try:
            words = iter(shlex.split(re.split(r"\s(?:#|\d?&?>)", command.group().replace("\\\n", " "))[0]))
        except ValueError:  # quotes around several commands
            continue
        for word in itertools.dropwhile(lambda word: word not in ("install", "add"), words):
            if word in _LISTED:
                found.append(f"{word} {next(words, '')}")
            elif word in _WITH_VALUE:
                next(words, None)
            elif not word.startswith("-") and word not in ("install", "add") and word[:1] != "$":
                found.append(word)
    return list(dict.fromkeys(found))


def is_install(text: str) -> bool:
    """Return whether commands, or words in a list, install packages."""
    return re.search(_INSTALLER, text) is not None


def port_requirements_file(text: str) -> tuple[str, list[Finding]]:
    """Return a requirements file with Determined replaced, and findings for the rest."""
    lines = []
    findings = [_useless(found.group(1), line_at(text, found.start(1))) for found in _REQUIRED_USELESS.finditer(text)]
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        comment = _COMMENT.search(line)
        content = line[: comment.start()] if comment else line.rstrip()
        if content.endswith("\\") and content.strip().startswith("determined"):
            reason = "Determined is required with hashes of its files"
            advice = f"replace it with {_NAME} and generate the file again"
            findings.append(Finding(number, Severity.problem, reason, advice))
        ported = port_requirement(content)
        lines.append(line if ported is None else ported + line[len(content) :])
    ported = "".join(lines)
    return ported, [*findings, *_note_urls(ported)]


def _note_urls(text: str) -> list[Finding]:
    """Return findings for requirements of Determined by a URL other than Determined's own."""
    reason = "Determined is installed from a URL"
    lines = [line_at(text, found.end()) for found in _BY_URL.finditer(text)]
    return [Finding(line, Severity.problem, reason, f"require {_NAME} instead") for line in lines]


def useless_installs(text: str, first_line: int) -> list[Finding]:
    """Return findings for installed packages that are of no use outside of Determined."""
    return [
        _useless(found.group(1), line_at(text, command.start() + found.start(), first_line))
        for command in _INSTALL.finditer(text)
        for found in _INSTALLED_USELESS.finditer(command.group())
    ]


def _useless(package: str, line: int) -> Finding:
    reason = "is built on determined" if package.startswith("model") else "talks to a Determined master"
    premise = Premise.nothing if package.startswith("model") else Premise.unneeded
    return Finding(line, Severity.problem, f"{package}: it {reason}", "remove it", premise=premise)


def port_config_file(text: str) -> tuple[str, list[Finding]]:
    """Return ``pyproject.toml``, ``setup.cfg``, ``tox.ini`` or a ``Pipfile`` with other requirements."""
    reader = _ConfigReader()
    ported = "".join(reader.port(line) for line in text.splitlines(keepends=True))
    return ported, [*reader.findings, *_note_urls(ported)]


class _ConfigReader:
    """Tracks, line by line, whether requirements are listed."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._section = ""
        self._key = ""
        self._line = 0
        self._depth = 0  # of open brackets

    def port(self, line: str) -> str:
        self._line += 1
        if not self._depth and (section := _SECTION.match(line)):
            self._section = section.group(1).strip()
            self._key = ""
            table, _, package = self._section.rpartition(".")
            if package == "determined" and table == _SOURCES:
                self._note(*_SOURCE)
            elif package == "determined" and table.endswith(_NAMED_SECTIONS):
                self._note(*_TABLE)
            return line
        goes_on = self._depth > 0 or (line[:1].isspace() and self._requires())
        key = None if goes_on else _KEY.match(line)
        value = key["value"] if key else line
        is_list = key is not None and value.lstrip().startswith("[")
        if key:
            self._key = key["key"]
        if self._depth or is_list:
            self._depth += value.count("[") - value.count("]")
        is_ours = key is not None and self._key == "determined"
        if is_ours and self._section.endswith(_NAMED_SECTIONS) and not is_list:
            return self._port_named(line)
        if is_ours and self._section == _SOURCES:
            if value.rstrip().endswith("}") and re.search(rf"[\"']{_RELEASE}[\"']", value):
                return ""
            self._note(*_SOURCE)
        is_requirement = self._requires() and not line.lstrip().startswith("#")
        return self._port_list(line, key) if is_requirement else line

    def _note(self, reason: str, advice: str) -> None:
        self.findings.append(Finding(self._line, Severity.problem, reason, advice))

    def _requires(self) -> bool:
        return self._key in _KEYS or self._section.endswith(_SECTIONS)

    def _port_list(self, line: str, key: re.Match[str] | None) -> str:
        quoted = _QUOTED.sub(lambda m: m[1] + (port_requirement(m[2]) or m[2]) + m[1], line)
        if quoted != line:
            return quoted
        before = ""
        if key is not None:
            before = line[: line.index(key["value"])] if key["value"].strip() else line
        comment = _COMMENT.search(line)
        end = comment.start() if comment else len(line)
        bare = line[len(before) : end]
        ported = port_requirement(bare)
        return line if ported is None else before + bare.replace(bare.strip(), ported) + line[end:]

    def _port_named(self, line: str) -> str:
        found = _VERSION.match(line)
        if found is None:
            self._note(*_TABLE)
            return line
        before, between, quote, any_version, rest = found.groups()
        return f"{before}{_NAME}{between}{quote}{any_version or _compatible()}{quote}{rest}"
