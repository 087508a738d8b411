"""Rewrites names, commands and variables in strings: annotations, module paths, ``subprocess`` arguments.

``determined`` stays in all other strings.
"""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting import commands
from det_lightning.porting.counterparts import counterpart, missing, missing_prefix
from det_lightning.porting.findings import Premise, Severity
from det_lightning.porting.imports import ImportRewriter
from det_lightning.porting.python_syntax import (
    PythonFile,
    dotted_name,
    last_name,
    list_targets,
    read_string,
    rename_in_code,
)
from det_lightning.porting.requirements import is_install, note_packages, port_installs, port_requirement

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
_BETWEEN_WORDS = re.compile(r"[\"',+()\[\]]")
_PROGRAM = (
    "a string with Python that imports determined",
    "port the code by hand, or keep it in a separate file",
)


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
        new = _port_command(file, text, text.value)
        if new != text.value:
            file.replace(text, new)


def _rewrite(file: PythonFile, node: cst.SimpleString, value: str) -> None:
    line = file.line(node)
    if _is_requirement(file, node):
        file.findings += note_packages(value, line)
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
        _put(file, node, _port_command(file, node, value))


def _port_command(file: PythonFile, node: cst.CSTNode, text: str) -> str:
    line = file.line(node)
    ported, launched = commands.port_commands(text, line)
    ported, packages = port_installs(ported, line)
    file.findings += [*launched, *packages]
    return ported


def _put(file: PythonFile, node: cst.CSTNode, value: str) -> None:
    if isinstance(node, cst.SimpleString) and value != node.raw_value:
        file.replace(node, f"{node.prefix}{node.quote}{value}{node.quote}")


def _is_requirement(file: PythonFile, node: cst.SimpleString) -> bool:
    """Return whether a string is in a list of requirements, or names a package to install or to ask for."""
    if _is_first_argument(file, node, _TAKE_DISTRIBUTIONS) and _DISTRIBUTIONS.search(file.edits.text):
        return True
    for outer in file.ancestors(node):
        if isinstance(outer, cst.List | cst.Tuple) and is_install(file.source(outer)):
            return True
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


# Commands started by Python


def note_started_commands(file: PythonFile) -> None:
    """Note the commands of ``det``, and the Python in commands, that a program starts."""
    started: list[cst.CSTNode] = []
    for call in file.find(cst.Call):
        if last_name(call.func) in _START and call.args:
            started += [call, *file.find_values(call.args[0].value)]
    for node in started:
        if commands.IMPORTED.search(file.source(node)) and not any(one in started for one in file.ancestors(node)):
            file.note(node, Severity.problem, *_PROGRAM, Premise.changed)
    for words in file.find(cst.List, cst.Tuple):
        first = read_string(words.elements[0].value) if words.elements else None
        started += [words] if (first or "").rpartition("/")[2] == "det" else []
    for node in started:
        text = _BETWEEN_WORDS.sub(" ", file.source(node)).replace("\n", "\\\n")
        file.findings += commands.note_det_commands(text, file.line(node))
