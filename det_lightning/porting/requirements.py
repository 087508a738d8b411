"""Replaces Determined wherever a project lists requirements."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterator

import det_lightning
from det_lightning.porting.findings import Finding, Premise, Severity, line_at

_NAME = "det-lightning"
_EXTRAS = r"(?:\s*\[[^\]]*\])?"
_SPEC = r"(?P<spec>\s*\(?(?:===|[<>=!~]=?)\s*[^;#\s'\"]+(?:\s*,\s*[<>=!~]=?\s*[^;#\s'\"]+)*)?"
_REQUIREMENT = re.compile(rf"determined{_EXTRAS}{_SPEC}(?P<marker>\s*;.*)?", re.DOTALL | re.IGNORECASE)
_IN_COMMAND = re.compile(
    rf"(?P<before>[\s,\"'])determined{_EXTRAS}{_SPEC.replace('[^;#', '[^;#&|)')}(?!\s*@)(?P<after>$|(?=[\s\"';&|)\\]))"
)
# With options before the command, also in a list of quoted words.
_INSTALLER = r"\b(?:pip3?|pipenv|poetry|uv)\b(?:[\"',\s]+(?:pip|-[\w=-]+)){0,4}[\"',\s]+(?:install|add)\b"
_INSTALL = re.compile(rf"{_INSTALLER}(?:\\\r?\n|(?!&&|\s[&#])[^\n;|])*")
_GONE = re.compile(r"(?<![\w./-])(determined[-_](?:cli|common|deploy|sdk)|model[-_]hub)(?![\w-])")
# A release, the repository, or any other place of Determined.
_FROM_URL = re.compile(
    r"\bdetermined(?:\[[^\]]*\])?\s*@|#egg=determined\b|\bdetermined-\d[^\s\"';#]*\.(?:whl|zip|tar\.gz)"
    r"|/determined-ai/determined(?:\.git)?(?=[\s\"'@#]|$)"
)
_COMMENT = re.compile(r"(?<!\s)\s+#|^\s*#")
# Options of pip install with a value; the first are lines of a requirements file too.
_LISTED = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-i", "--index-url", "--extra-index-url",
           "-f", "--find-links")  # fmt: skip
_WITH_VALUE = ("-t", "--target", "--prefix", "--root", "--trusted-host", "--timeout", "--progress-bar")
# In configuration files: keys and sections with lists of requirements, and sections with a key for each package.
_KEYS = {"dependencies", "dev-dependencies", "requires", "install_requires", "tests_require", "setup_requires", "deps"}
_SECTIONS = ("optional-dependencies", "dependency-groups", "dev-dependencies", "extras_require")
_NAMED_SECTIONS = ("dependencies", "packages", "dev-packages", "tool.uv.sources")
_SECTION = re.compile(r"\s*\[+([^\[\]]+)\]+\s*(?:#.*)?$")
_KEY_OF_TOML = re.compile(r"\s*[\"']?(?P<key>[\w.-]+)[\"']?\s*=(?!=)\s*(?P<value>.*)", re.DOTALL)
_KEY_OF_INI = re.compile(r"(?P<key>[\w.-]+)\s*(?:=(?!=)|:)\s*(?P<value>.*)", re.DOTALL)
_VERSION = re.compile(r"[\"'](\*?)[^\"']*[\"']")
_QUOTED = re.compile(r"([\"'])(determined\b(?:(?!\1).)*)\1")


@functools.cache
def _compatible() -> str:
    """Return the version requirement, written so that a shell does not interpret it."""
    major, minor, *_ = det_lightning.__version__.split(".")
    return f"~={major}.{minor}"


def port_requirement(requirement: str) -> str | None:
    """Return the requirement to write instead of a requirement of Determined, or None for other packages."""
    found = _REQUIREMENT.fullmatch(requirement.strip())
    return found and _NAME + (_compatible() if found["spec"] else "") + (found["marker"] or "")


def port_installs(text: str, first_line: int) -> tuple[str, list[Finding]]:
    """Return shell commands with det_lightning installed in place of Determined, and findings for the rest."""

    def require(found: re.Match[str]) -> str:
        return found["before"] + _NAME + (_compatible() if found["spec"] else "")

    findings: list[Finding] = []
    for command in _INSTALL.finditer(text):
        findings += note_packages(command.group(), line_at(text, command.start(), first_line))
    return _INSTALL.sub(lambda command: _IN_COMMAND.sub(require, command.group()), text), findings


def note_packages(text: str, first_line: int) -> Iterator[Finding]:
    """Yield findings for packages of no use outside of Determined, and for Determined by a URL."""
    for found in _GONE.finditer(text):
        of_models = found[1].startswith("model")
        reason = f"{found[1]}: it {'is built on determined' if of_models else 'talks to a Determined master'}"
        premise = Premise.nothing if of_models else Premise.unneeded
        line = line_at(text, found.start(), first_line)
        yield Finding(line, Severity.problem, reason, "remove it", premise=premise)
    for line in dict.fromkeys(line_at(text, found.start(), first_line) for found in _FROM_URL.finditer(text)):
        yield Finding(line, Severity.problem, "Determined is installed from a URL", f"require {_NAME} instead")


def list_installed(text: str) -> list[str]:
    """Return what shell commands install with pip, as lines of a requirements file."""
    found: list[str] = []
    for command in _INSTALL.finditer(re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)):
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
    findings: list[Finding] = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        content = _without_comment(line)
        if not content.lstrip().startswith(("-r", "-c", "-f", "--")):  # a file's name or a place
            findings += note_packages(content, number)
        if content.endswith("\\") and content.strip().startswith("determined"):
            reason = "Determined is required with hashes of its files"
            advice = f"replace it with {_NAME} and generate the file again"
            findings.append(Finding(number, Severity.problem, reason, advice))
        ported = port_requirement(content)
        lines.append(line if ported is None else ported + line[len(content) :])
    return "".join(lines), findings


def _without_comment(line: str) -> str:
    comment = _COMMENT.search(line)
    return line[: comment.start()] if comment else line.rstrip()


def port_toml_file(text: str) -> tuple[str, list[Finding]]:
    """Return ``pyproject.toml`` or a ``Pipfile`` with other requirements."""
    return _port_config_file(text, _KEY_OF_TOML)


def port_ini_file(text: str) -> tuple[str, list[Finding]]:
    """Return ``setup.cfg`` or ``tox.ini`` with other requirements; there, indented lines go on with a value."""
    return _port_config_file(text, _KEY_OF_INI)


def _port_config_file(text: str, key_pattern: re.Pattern[str]) -> tuple[str, list[Finding]]:
    lines = []
    findings: list[Finding] = []
    section = key = ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        found = key_pattern.match(line)
        if line.lstrip().startswith("#"):
            lines.append(line)
            continue
        if header := _SECTION.match(line):
            section, key = header[1].strip(), ""
        elif found:
            key = found["key"]
        lists = key in _KEYS or section.endswith(_SECTIONS)
        is_table = section.endswith(tuple(f"{name}.determined" for name in _NAMED_SECTIONS))
        is_named = found is not None and key == "determined" and section.endswith(_NAMED_SECTIONS)
        value = found["value"] if found and is_named else ""
        if version := _VERSION.match(value):
            line = line.replace("determined", _NAME, 1).replace(version[0], f'"{version[1] or _compatible()}"', 1)
        elif (header and is_table) or (value and not (lists and value.startswith("["))):
            advice = f"require {_NAME} instead"
            findings.append(Finding(number, Severity.problem, "Determined is required by a table", advice))
        elif lists:
            findings += note_packages(_without_comment(line), number)
            line = _port_listed(line, found)
        lines.append(line)
    return "".join(lines), findings


def _port_listed(line: str, key: re.Match[str] | None) -> str:
    """Return a line of a list of requirements, in quotes or bare, with Determined replaced."""
    quoted = _QUOTED.sub(lambda found: found[1] + (port_requirement(found[2]) or found[2]) + found[1], line)
    content = _without_comment(line)
    bare = content[0 if key is None else key.start("value") :]
    ported = port_requirement(bare)
    return (
        quoted if ported is None else content[: -len(bare)] + bare.replace(bare.strip(), ported) + line[len(content) :]
    )
