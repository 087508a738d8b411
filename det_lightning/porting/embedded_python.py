"""Where shell commands contain Python: ``python -c`` and here-documents."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

# By name, or by a variable as in a Makefile.
_INTERPRETER = r"(?:\bpython[\d.]*(?![\w.-])|\$[({]?\w*PYTHON3?\b[)}]?)[\"']?"
# Lengths are limited because a search begins again at each of these words. In a list of quoted words too.
_GAP = r"(?:[\"', \t]|\\\r?\n)+"
_OPTION = (
    rf"{_INTERPRETER}(?:{_GAP}-(?:[WX]{_GAP}[\w:.=]+|(?![cm])\w[\w:.=]*)){{0,5}}{_GAP}-[bBdEiIOPqsSuvx]*c"
    r"(?:[\"'][ \t]*,)?(?:[ \t]|\\\r?\n)*"
)
_PIPED = rf"\|[ \t]*{_INTERPRETER}(?:[ \t]+-\w*)*[ \t\r]*(?:$|[;&|>)])"
_TO_FILE = r"(?:>|\btee\b(?:[ \t]+-a)?)[ \t]*[\"']?[^\s\"';&|<>]{0,200}\.py\b"
_WRITTEN = rf"\b(?=cat\b|tee\b)(?=[^\n]{{0,300}}?(?:{_TO_FILE}|{_PIPED}))[^\n<|;&]{{0,300}}"
_READ = rf"{_INTERPRETER}(?:[ \t]+-\w+)*(?:[ \t]+-(?:[ \t][^\n<|;&]{{0,300}})?)?"
# What the shell removes before the code begins.
_JOINED = r"(?:[ \t]*\\\r?\n)*"
_PARTS = re.compile(
    r"(?P<comment>^[ \t]*#[^\n]*\n?)"
    rf"|(?:{_READ}|{_WRITTEN})[ \t]*<<-?[ \t]*['\"\\]?(?P<end>\w+)['\"]?[^\n]*\n"
    r"(?P<document>(?:[^\n]*\n){0,1000}?)(?=[ \t]*(?P=end)[ \t\r]*$)"
    rf"|{_OPTION}(?:'{_JOINED}(?P<single>[^']*)'|\"{_JOINED}(?P<double>(?:\\.|[^\"\\])*)\""
    r"|\\\"(?P<escaped>[^\"\\\n]*)\\\")",
    re.MULTILINE | re.DOTALL,
)
# Expansions by the shell or by make; names replace these during porting.
_EXPANSION = re.compile(r"\$\$?(?:\w+|\{\{[^}\n]{0,200}\}\}|\{[^{}\n]*\}|\([^()\n]*\))")
EXPANDED = "_expanded_by_the_shell_"
_FIRST_INDENT = re.compile(r"^([ \t]*)\S", re.MULTILINE)


def port_parts(
    text: str, port_commands: Callable[[str, int], str], port_code: Callable[[str, int], str], first_line: int = 1
) -> str:
    """Port a shell script by two functions, for the commands and for the Python code, and return the new script.

    Each function gets a part of the script and the number of the part's first line. Comments stay.
    """
    written = []
    position = 0
    line = first_line
    for start, end, kind in _split(text):
        commands = text[position:start]
        written.append(port_commands(commands, line))
        line += commands.count("\n")
        part = text[start:end]
        written.append(part if kind == "comment" else _port(part, kind, line, port_code))
        line += part.count("\n")
        position = end
    return "".join([*written, port_commands(text[position:], line)])


def find_programs(text: str) -> list[tuple[int, int, str]]:
    """Return from where to where a shell script contains Python code, and the code."""
    found = [(start, end, kind) for start, end, kind in _split(text) if kind != "comment"]
    return [(start, end, _unquote(text[start:end], kind)[0]) for start, end, kind in found]


def _split(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the kind of each part besides commands."""
    for found in _PARTS.finditer(text):
        kind = next(name for name in ("comment", "document", "single", "double", "escaped") if found[name] is not None)
        yield *found.span(kind), kind


def _port(part: str, kind: str, line: int, port_code: Callable[[str, int], str]) -> str:
    code, indent = _unquote(part, kind)
    ported = port_code(code, line)
    if ported == code:
        return part
    known = {_make_name(index): found for index, found in enumerate(_EXPANSION.findall(part))}
    ported = re.sub(rf"{EXPANDED}\d+_", lambda found: known.get(found.group(), found.group()), ported)
    indented = "".join(indent + row if row.strip() else row for row in ported.splitlines(keepends=True))
    return indented.replace('"', '\\"') if kind == "double" else indented


def _unquote(part: str, kind: str) -> tuple[str, str]:
    """Return code as Python reads the code, and the common indentation of all lines in the script."""
    numbers = itertools.count()
    text = _EXPANSION.sub(lambda _: _make_name(next(numbers)), part)
    text = text.replace('\\"', '"') if kind == "double" else text
    found = _FIRST_INDENT.search(text)
    indent = found.group(1) if found else ""
    rows = text.splitlines(keepends=True)
    if not all(row.startswith(indent) for row in rows if row.strip()):
        return text, ""
    return "".join(row.removeprefix(indent) if row.strip() else row for row in rows), indent


def _make_name(index: int) -> str:
    return f"{EXPANDED}{index}_"
