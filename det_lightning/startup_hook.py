"""The start-up hook of a project's trials, and the commands in the hook with a possible installation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The name of the hook, next to the code.
STARTUP_HOOK = "startup-hook.sh"
#: A comment that accepts a line.
ACCEPTED = re.compile(r"#\s*det-lightning:\s*ok\b")

# Every other command counts as a possible installation.
_HARMLESS = re.compile(
    r":|\[\[?|basename|break|cat|cd|chmod|continue|cp|date|declare|df|dirname|du|echo|exit|export|false|free|grep|head"
    r"|hostname|id|local|ls|ln|mkdir|mktemp|mv|nproc|nvidia-smi|printf|pwd|readlink|readonly|realpath|return|rm|set|shift"
    r"|shopt|sleep|stat|tail|tee|test|touch|tr|true|ulimit|umask|uname|unset|wc|which|whoami|}|fi|done|esac|for|case"
)
# After these a command begins.
_KEYWORD = re.compile(r"if|then|else|elif|while|until|do|!|{")
_SHELL = re.compile(r"sh|bash|source|\.")
_SCRIPT = re.compile(r"(?:\./)?\w[\w./-]*\.(?:ba)?sh")
_ASSIGNMENT = re.compile(r"\w+\+?=")
_SUBSTITUTION = re.compile(r"`|\$\((?!\()")
_TOKEN = re.compile(
    r"(?P<space>(?:[ \t\r]|\\\r?\n)+)|(?P<comment>(?<![^\s;&|])\#[^\n]*)|(?P<newline>\n)"
    r"|(?P<function>[\w-]+[ \t]*\([ \t]*\))|(?P<opens>[$<>]?\((?!\()|`)|(?P<closes>\))"
    r"|(?P<redirects>>>|>&|&>|<<<|>\||>|<(?!<))|(?P<separates>[;&|]+)"
    r"|(?P<word>(?:\$\(\([^()`]*\)\)|\\[^\n]|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\$(?![('\"])|[^\s;&|()<>`\"'\\$])+)"
    r"|(?P<unknown>.)",
    re.DOTALL,
)


class Install(NamedTuple):
    """A command with a possible installation."""

    line: int
    tool: str
    text: str  # the whole line, with continuation lines


def find_installs(script: str) -> list[Install]:
    """Return the commands of a shell script with a possible installation, except on lines accepted by a comment.

    Every command counts, unless known to be harmless: programs have many ways to install.
    """
    return _Reader(script).found


def find_all_installs(code: Path) -> Iterator[tuple[Path, Install]]:
    """Yield the possible installations in the hook of a directory, and in the scripts run by the hook."""
    scripts = [code / STARTUP_HOOK]
    for script in scripts:  # grows
        if script.is_file():
            reader = _Reader(script.read_text(encoding="utf-8", errors="replace"))
            yield from ((script, install) for install in reader.found)
            yield from ((script, run) for run in reader.runs if not (code / run.tool).is_file())
            scripts += [path for run in reader.runs if (path := code / run.tool) not in scripts]


class _Reader:
    """Finds the commands of a shell script, nested commands included; less strict than a shell."""

    def __init__(self, script: str, *, begins: bool = True) -> None:
        self.found: list[Install] = []
        self.runs: list[Install] = []  # the scripts to run
        self._tools: list[str] = []  # possible installers in the line
        self._scripts: list[str] = []  # scripts in the line
        self._open: list[tuple[str, bool]] = []  # brackets, and whether a command began before
        self._begins = begins  # a word is a command, rather than an argument
        self._shell = ""  # a shell before its script
        self._is_file = False  # the next word is the target of a redirection
        self._is_joined = False  # the next word continues the last word
        self._has_moved = False  # names of scripts mean other files
        start = 0
        accepted = False
        for token in _TOKEN.finditer(script + "\n"):
            kind = str(token.lastgroup)
            if token.group() == "`" and self._open and self._open[-1][0] == "`":
                kind = "closes"
            accepted = accepted or (kind == "comment" and ACCEPTED.search(token.group()) is not None)
            if kind in ("newline", "separates"):
                self._end_command()
            if kind == "newline":
                self._end_line(script, start, token.start(), accepted)
                start = token.end()
                accepted = False
            self._take(kind, token.group())
            self._is_joined = kind in ("word", "closes")

    def _end_line(self, script: str, start: int, end: int, accepted: bool) -> None:
        line = script.count("\n", 0, start) + 1
        text = " ".join(script[start:end].replace("\\\n", " ").split())
        if not accepted:
            self.found += [Install(line, tool, text) for tool in self._tools[:1]]
            self.runs += [Install(line, name, text) for name in self._scripts]
        self._tools = []
        self._scripts = []

    def _end_command(self) -> None:
        if self._shell:  # the shell reads commands from elsewhere
            self._tools.append(self._shell)
        self._begins = True
        self._shell = ""
        self._is_file = False

    def _take(self, kind: str, text: str) -> None:
        if kind == "word":
            self._take_word(text)
        elif kind == "closes":
            self._end_command()
            bracket, begins = self._open.pop() if self._open else ("(", True)
            self._begins = begins or bracket == "("
        elif kind == "opens":
            if text in ("$(", "`") and self._begins and not self._is_joined:
                self._tools.append(text)
            self._open.append((text, self._begins))
            self._end_command()
        elif kind == "redirects":
            self._is_file = True
        elif kind == "function":
            self._begins = True
        elif kind == "unknown":
            self._tools.append(text)

    def _take_word(self, word: str) -> None:
        if _SUBSTITUTION.search(word):
            inner = _Reader(re.sub(r"['\"#\\\n]", "_", word), begins=False)
            self._tools += [found.tool for found in (*inner.found, *inner.runs)]
        if self._is_file:
            self._is_file = False
        elif self._shell:
            self._take_script(word)
        elif self._begins and not self._is_joined:
            self._take_command(word)

    def _take_script(self, word: str) -> None:
        if word.startswith("-") and "c" not in word:
            return
        if _SCRIPT.fullmatch(word) and not self._has_moved:
            self._scripts.append(word)
        else:
            self._tools.append(self._shell)
        self._shell = ""

    def _take_command(self, word: str) -> None:
        if _KEYWORD.fullmatch(word) or _ASSIGNMENT.match(word):
            return
        self._begins = False
        self._has_moved = self._has_moved or word == "cd"
        if _SHELL.fullmatch(word):
            self._shell = word
        elif _SCRIPT.fullmatch(word) and "/" in word and not self._has_moved:
            self._scripts.append(word)
        elif _HARMLESS.fullmatch(word) is None:
            self._tools.append(word)
