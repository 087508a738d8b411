"""The start-up hook of a project's trials: the lines in it that install something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The name of the hook, next to the code.
STARTUP_HOOK = "startup-hook.sh"

_LINE = re.compile(r"(?:[^\n]*\\\n)*[^\n]*\n?")
_INSTALLER = re.compile(
    r"[^#]*?(?<![\w.-])(?:(?P<tool>pip[\d.]*|pipx|uv|pipenv|poetry|pdm|conda|mamba|micromamba|apt|apt-get|aptitude|yum|dnf"
    r"|apk|brew|npm)\s+(?:(?:-\S+|pip|env)\s+){0,10}(?:install|add|create|update|upgrade|sync|dist-upgrade)\b"
    r"|(?P<setup>easy_install|setup\.py\s+(?:install|develop)|dpkg\s+-i)\b"
    r"|(?P<download>curl|wget)\b[^|\n]*\|\s*(?:sudo\s+)?(?:ba)?sh\b)"
)
#: A line with this comment was looked at, and is right as it is.
ACCEPTED = re.compile(r"#\s*det-lightning:\s*ok\b")
_SCRIPT = re.compile(r"[\w./-]+\.(?:ba)?sh\b")


class Install(NamedTuple):
    """A command that installs something."""

    line: int  # the first of the command
    tool: str
    text: str


def find_installs(script: str) -> list[Install]:
    """Return the commands of a shell script that install something, without those that a comment accepts."""
    found = []
    line = 1
    for command in _LINE.findall(script):
        installer = _INSTALLER.match(command)
        if installer and not ACCEPTED.search(command):
            tool = installer["tool"] or installer["setup"] or installer["download"]
            found.append(Install(line, tool, " ".join(command.replace("\\\n", " ").split())))
        line += command.count("\n")
    return found


def installs_of(code: Path) -> Iterator[tuple[Path, Install]]:
    """Yield the commands that install something, in the hook of a directory and in the scripts that the hook names."""
    scripts = [code / STARTUP_HOOK]
    for script in scripts:  # which grows
        if script.is_file():
            text = script.read_text(encoding="utf-8", errors="replace")
            yield from ((script, install) for install in find_installs(text))
            scripts += [path for name in _SCRIPT.findall(text) if (path := code / name) not in scripts]
