"""Commands of ``det`` that Python starts, as with ``subprocess.run`` or ``os.system``."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from det_lightning.porting.det_commands import (
    NoCounterpart,
    is_det_command,
    needs_a_master,
    port_det_commands,
    translated,
)
from det_lightning.porting.findings import Need
from det_lightning.porting.python_syntax import PythonFile, last_name, string_of

_START = {
    "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "popen", "run", "system",
    "create_subprocess_exec", "create_subprocess_shell", "split",
}  # fmt: skip
_QUOTED = re.compile(r"(?P<start>\w*(?P<quote>\"\"\"|'''|\"|'))(?P<text>.*)(?P=quote)", re.DOTALL)


def rewrite_started_commands(file: PythonFile) -> None:
    """Translate the commands of ``det`` that a file starts; note those that nothing replaces."""
    for call in file.find(cst.Call):
        if last_name(call.func) in _START and call.args:
            first = call.args[0].value
            if isinstance(first, cst.SimpleString | cst.FormattedString):
                _rewrite_line(file, first)
            if not any(argument.star for argument in call.args):
                _rewrite_words(file, [argument.value for argument in call.args if argument.keyword is None])
    for sequence in file.find(cst.List, cst.Tuple):
        if not any(isinstance(element, cst.StarredElement) for element in sequence.elements):
            _rewrite_words(file, [element.value for element in sequence.elements])


def _rewrite_line(file: PythonFile, node: cst.BaseExpression) -> None:
    """Rewrite a string that is a line for the shell."""
    source = file.source(node)
    quoted = _QUOTED.fullmatch(source)
    assert quoted is not None, "it is the source of a string"
    ported, findings = port_det_commands(quoted["text"], file.line(node))
    file.findings += [dataclasses.replace(finding, needs_determined=Need.script) for finding in findings]
    if ported != quoted["text"]:
        file.replace(node, quoted["start"] + ported + quoted["quote"])


def _rewrite_words(file: PythonFile, nodes: list[cst.BaseExpression]) -> None:
    """Rewrite a command that is given as words; an expression stands for one word."""
    values = [string_of(node) for node in nodes]
    if not values or values[0] != "det":
        return
    sources = [file.source(node) for node in nodes]
    words = [f"{{{source}}}" if value is None else value for value, source in zip(values, sources, strict=True)]
    if not is_det_command(words):
        return
    start = file.span(nodes[0])[0]
    end = file.span(nodes[-1])[1]
    try:
        if "#" in file.edits.text[start:end]:
            raise NoCounterpart("translate it by hand, since there is a comment in it")
        new = translated(words)
    except NoCounterpart as e:
        file.findings.append(needs_a_master(words, str(e), file.line(nodes[0]), Need.script))
        return
    known = dict(zip(reversed(words), reversed(sources), strict=True))
    quote = sources[0][-1]
    file.edits.replace(start, end, ", ".join(known.get(word, f"{quote}{word}{quote}") for word in new))
