"""Strings with names, commands and variables, for example annotations, module paths and arguments of ``subprocess``.

``determined`` stays in all other strings.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import libcst as cst

from det_lightning.porting import commands, det_program
from det_lightning.porting.commands import IMPORTED
from det_lightning.porting.counterparts import counterpart, missing, missing_prefix
from det_lightning.porting.findings import Need, Premise, Severity
from det_lightning.porting.imports import ImportRewriter
from det_lightning.porting.python_syntax import (
    PythonFile,
    dotted_name,
    last_name,
    list_targets,
    read_string,
    rename_in_code,
)
from det_lightning.porting.requirements import is_install, port_installs, port_requirement

_PATH = re.compile(r"determined(\.\w+)*")
_LAUNCHER = re.compile(r"determined\.launch\.(\w+)")
_INSIDE = re.compile(r"determined\.(?:exec|cli|deploy)\b[\w.]*")
_DISTRIBUTIONS = re.compile(r"\b(?:importlib[._]metadata|importlib\s+import\s+metadata|pkg_resources)\b")
_TAKE_DISTRIBUTIONS = {"distribution", "files", "get_distribution", "metadata", "require", "requires", "version"}
_REQUIREMENTS = {"extras_require", "install_requires", "requires", "setup_requires", "tests_require"}
_TAKE_PATHS = {
    "__import__", "find_spec", "getLogger", "import_module", "importorskip", "patch", "run_module", "setattr",
}  # fmt: skip

_START = {
    "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "popen", "run", "system",
    "create_subprocess_exec", "create_subprocess_shell", "split",
}  # fmt: skip
_Strings = cst.SimpleString | cst.FormattedString
_READ_OUTPUT = ("PIPE", "capture_output", "check_output", "getoutput", "popen")
_PROGRAM = (
    "a string with Python that imports determined",
    "port the code by hand, or keep it in a separate file",
)
_QUOTED = re.compile(r"(?P<start>\w*(?P<quote>\"\"\"|'''|\"|'))(?P<text>.*)(?P=quote)", re.DOTALL)


def rewrite_strings(file: PythonFile, imports: ImportRewriter) -> None:
    """Rewrite the strings with names of Determined."""
    for node in file.find(cst.SimpleString):
        value = read_string(node)
        if value is not None and not isinstance(file.parent(node), cst.Expr):  # a docstring
            if file.is_annotation(node):
                _put(file, node, rename_in_code(value, imports.spell))
            elif "determined" in value:
                _rewrite(file, node, value)
    for text in file.find(cst.FormattedStringText):
        new, findings = commands.port_commands(text.value, file.line(text))
        file.findings += findings
        if new != text.value:
            file.replace(text, new)


def _rewrite(file: PythonFile, node: cst.SimpleString, value: str) -> None:
    line = file.line(node)
    if _is_requirement(file, node):
        _put(file, node, port_requirement(value) or value)
    elif _PATH.fullmatch(value) and _is_first_argument(file, node, _TAKE_PATHS):
        is_logger = _is_first_argument(file, node, {"getLogger"})  # which may have any name
        ours = f"det_lightning{value.removeprefix('determined')}" if is_logger else counterpart(value)
        if ours is None:
            file.findings.append(missing(missing_prefix(value), line))
        else:
            _put(file, node, ours)
    elif launcher := _LAUNCHER.fullmatch(value):
        _rewrite_launcher(file, node, launcher.group(1))
    elif _INSIDE.fullmatch(value) and isinstance(file.parent(node), cst.Element):
        file.findings += commands.port_commands(f"-m {value}", line)[1]
    else:
        new, findings = commands.port_commands(value, line)
        file.findings += findings
        _put(file, node, new)


def _put(file: PythonFile, node: cst.CSTNode, value: str) -> None:
    if isinstance(node, cst.SimpleString) and value != node.raw_value:
        file.replace(node, f"{node.prefix}{node.quote}{value}{node.quote}")


def _is_requirement(file: PythonFile, node: cst.SimpleString) -> bool:
    """Return whether a string is in a list of requirements, as in ``setup.py``, or asks for an installed package."""
    if _is_first_argument(file, node, _TAKE_DISTRIBUTIONS) and _DISTRIBUTIONS.search(file.edits.text):
        return True
    for outer in file.ancestors(node):
        if isinstance(outer, cst.Arg) and outer.keyword is not None:
            return outer.keyword.value in _REQUIREMENTS
        if isinstance(outer, cst.Assign | cst.AnnAssign):
            passed = [one for one in file.find(cst.Arg) if one.keyword and one.keyword.value in _REQUIREMENTS]
            required = {name.value for one in passed for name in file.names(within=one.value)}
            return any(dotted_name(target) in required for target in list_targets(outer))
        if isinstance(outer, cst.Call | cst.Subscript | cst.BaseStatement | cst.Comparison):
            break
    return False


def _is_first_argument(file: PythonFile, node: cst.SimpleString, functions: set[str]) -> bool:
    argument = file.parent(node)
    call = file.parent(argument)
    if not isinstance(call, cst.Call) or not call.args:  # without arguments: a method of the string
        return False
    return call.args[0] is argument and last_name(call.func) in functions


def _rewrite_launcher(file: PythonFile, node: cst.SimpleString, module: str) -> None:
    words = commands.launcher_counterpart(module)
    if words is None:
        file.findings.append(commands.missing_launcher(module, file.line(node)))
    elif len(words) == 1:
        _put(file, node, words[0])
    elif isinstance(file.parent(node), cst.Element | cst.Arg):
        file.replace(node, ", ".join(f"{node.prefix}{node.quote}{word}{node.quote}" for word in words))
    else:
        reason = f"determined.launch.{module}: two words replace it, {' '.join(words)}"
        file.note(node, Severity.problem, reason, "write both into the command")


def note_platform(file: PythonFile) -> None:
    """Note Determined's variables in strings without other text, and paths in Determined's containers in any string."""
    for node in file.find(cst.SimpleString):
        value = read_string(node) or ""
        if re.fullmatch(r"\w+", value):
            file.findings += commands.note_variables(value, file.line(node))
        if not isinstance(file.parent(node), cst.Expr):  # a docstring
            file.findings += commands.note_container_paths(value, file.line(node))
    for text in file.find(cst.FormattedStringText):
        file.findings += commands.note_container_paths(text.value, file.line(text))


# Commands of det started by Python


def rewrite_started_commands(file: PythonFile) -> None:
    """Translate the started commands of ``det``, and note the untranslatable ones."""
    lines: dict[cst.CSTNode, bool] = {}
    for call in file.find(cst.Call):
        if last_name(call.func) in _START and call.args:
            for given in file.find_values(call.args[0].value):
                lines.update(_find_strings(file, given))
            if not any(argument.star for argument in call.args):
                _rewrite_words(file, [argument.value for argument in call.args if argument.keyword is None])
    for sequence in file.find(cst.List, cst.Tuple):
        if not any(isinstance(element, cst.StarredElement) for element in sequence.elements):
            _rewrite_words(file, [element.value for element in sequence.elements])
    for node, is_whole in lines.items():
        text = file.source(node)
        if is_whole:
            _rewrite_line(file, node, text)
        elif det_program.port_det_commands(text) != (text, []):
            words = re.split(r"\bdet\s+", text, maxsplit=1)[-1].split()
            advice = "translate the command by hand, because it is put together"
            file.findings.append(det_program.needs_a_master(["det", *words], advice, file.line(node), Need.script))


def _find_strings(file: PythonFile, command: cst.BaseExpression) -> dict[cst.CSTNode, bool]:
    """Return the strings in a command; True marks a string that is the whole command."""
    if isinstance(command, _Strings):
        return {command: True}
    method = command.func if isinstance(command, cst.Call) else None
    if isinstance(method, cst.Attribute) and isinstance(method.value, _Strings):
        return {method.value: method.attr.value == "split"}
    if isinstance(command, cst.BinaryOperation | cst.ConcatenatedString):
        return dict.fromkeys(file.find(cst.SimpleString, cst.FormattedString, within=command), False)
    return {}


def _rewrite_line(file: PythonFile, node: cst.CSTNode, source: str) -> None:
    """Rewrite a string with a line for the shell."""
    quoted = _QUOTED.fullmatch(source)
    assert quoted is not None, "it is the source of a string"
    ported, findings = det_program.port_det_commands(quoted["text"], file.line(node), _reads_output(file))
    ported = port_installs(ported)
    if IMPORTED.search(quoted["text"]):
        file.note(node, Severity.problem, *_PROGRAM, Premise.changed)
    file.findings += [
        dataclasses.replace(found, needs_determined=found.needs_determined and Need.script) for found in findings
    ]
    if ported != quoted["text"]:
        file.replace(node, quoted["start"] + ported + quoted["quote"])


def _reads_output(file: PythonFile) -> bool:
    return any(name in file.edits.text for name in _READ_OUTPUT)


def _rewrite_words(file: PythonFile, nodes: list[cst.BaseExpression]) -> None:
    """Rewrite a command given as words; an expression stands for one word."""
    values = [read_string(node) for node in nodes]
    if is_install(" ".join(value or "" for value in values)):
        for node, value in zip(nodes, values, strict=True):
            if value is not None and (required := port_requirement(value)) is not None:
                _put(file, node, required)
    for option, code in itertools.pairwise(nodes):
        if read_string(option) == "-c" and IMPORTED.search(file.source(code)):
            file.note(code, Severity.problem, *_PROGRAM, Premise.changed)
    sources = [file.source(node) for node in nodes]
    words = [f"{{{source}}}" if value is None else value for value, source in zip(values, sources, strict=True)]
    if not det_program.is_det_command(words):
        return
    start = file.span(nodes[0])[0]
    end = file.span(nodes[-1])[1]
    try:
        if "#" in file.edits.text[start:end]:
            raise det_program.NoCounterpart("translate the command by hand, because of the comment inside")
        new = det_program.translate(words)
    except det_program.NoCounterpart as e:
        file.findings.append(det_program.needs_a_master(words, str(e), file.line(nodes[0]), Need.script))
        return
    if _reads_output(file):
        file.findings.append(det_program.prints_something_else(words, file.line(nodes[0])))
    known = dict(zip(reversed(words), reversed(sources), strict=True))
    quote = sources[0][-1]
    file.edits.replace(start, end, ", ".join(known.get(word, f"{quote}{word}{quote}") for word in new))
