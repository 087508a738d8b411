"""Strings that hold names: annotations, module paths, commands. Others may say ``determined`` as they like."""

from __future__ import annotations

import ast
import re

import libcst as cst

from det_lightning.porting.counterparts import counterpart
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.imports import ImportRewriter
from det_lightning.porting.launchers import launcher_counterpart, port_commands
from det_lightning.porting.missing_parts import missing, missing_part
from det_lightning.porting.python_syntax import PythonFile, dotted_name, string_of
from det_lightning.porting.requirements import port_requirement

_PATH = re.compile(r"determined(\.\w+)*")
_LAUNCHER = re.compile(r"determined\.launch\.(\w+)")
_INSIDE = re.compile(r"determined\.(?:exec|cli|deploy)\b[\w.]*")
_REQUIREMENTS = {"extras_require", "install_requires", "requires", "setup_requires", "tests_require"}
_TAKE_PATHS = {
    "__import__",
    "find_spec",
    "getLogger",
    "import_module",
    "importorskip",
    "patch",
    "run_module",
    "setattr",
}


class StringRewriter(cst.CSTVisitor):
    """Rewrites the strings of a file that hold names of Determined.

    Args:
        file: the file.
        imports: what knows the names that the file uses.
    """

    def __init__(self, file: PythonFile, imports: ImportRewriter) -> None:
        super().__init__()
        self._file = file
        self._imports = imports

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802 (a method of libcst's)
        value = string_of(node)
        if value is None or self._is_docstring(node):
            return
        if self._is_annotation(node):
            self._put(node, self._annotation(value))
        elif "determined" not in value:
            return
        elif self._is_requirement(node):
            self._put(node, port_requirement(value) or value)
        elif _PATH.fullmatch(value) and self._is_path(node):
            self._rewrite_path(node, value)
        elif launcher := _LAUNCHER.fullmatch(value):
            self._rewrite_launcher(node, launcher.group(1))
        elif _INSIDE.fullmatch(value) and isinstance(self._file.parent(node), cst.Element):
            self._file.findings += port_commands(f"-m {value}", self._file.line(node))[1]
        else:
            new, findings = port_commands(value, self._file.line(node))
            self._file.findings += findings
            self._put(node, new)

    def _put(self, node: cst.SimpleString, value: str) -> None:
        if value != node.raw_value:
            self._file.replace(node, f"{node.prefix}{node.quote}{value}{node.quote}")

    def _is_docstring(self, node: cst.SimpleString) -> bool:
        return isinstance(self._file.parent(node), cst.Expr)

    # Annotations

    def _is_annotation(self, node: cst.CSTNode) -> bool:
        inner: cst.CSTNode = node
        for outer in self._file.ancestors(node):
            if isinstance(outer, cst.Annotation):
                return True
            if isinstance(outer, cst.Subscript):
                kind = dotted_name(outer.value).rpartition(".")[2]
                if kind == "Literal" or (kind == "Annotated" and inner is not outer.slice[0]):
                    return False
            if isinstance(outer, cst.Call):
                return self._is_type_argument(inner, outer)
            inner = outer
        return False

    def _is_type_argument(self, argument: cst.CSTNode, call: cst.Call) -> bool:
        name = dotted_name(call.func).rpartition(".")[2]
        if name == "cast":
            return argument is call.args[0]
        is_bound = isinstance(argument, cst.Arg) and argument.keyword is not None and argument.keyword.value == "bound"
        return name == "TypeVar" and is_bound

    def _annotation(self, value: str) -> str:
        try:
            tree = ast.parse(value, mode="eval")
        except (SyntaxError, ValueError):
            return value
        if not value.isascii() or "\n" in value:
            return value
        chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_dotted_name(node)]
        inner = {id(node.value) for node in chains}
        new = value
        for node in sorted((n for n in chains if id(n) not in inner), key=lambda n: -n.col_offset):
            name, *attributes = ast.unparse(node).split(".")
            spelled = self._imports.spelled(name, attributes)
            if spelled is not None:
                new = new[: node.col_offset] + spelled + new[node.end_col_offset :]
        return new

    # Requirements

    def _is_requirement(self, node: cst.SimpleString) -> bool:
        """Return whether a string stands in a list of requirements, as in ``setup.py``."""
        for outer in self._file.ancestors(node):
            if isinstance(outer, cst.Arg) and outer.keyword is not None:
                return outer.keyword.value in _REQUIREMENTS
            if isinstance(outer, cst.Call | cst.Subscript | cst.BaseStatement | cst.Comparison):
                return False
        return False

    # Module paths

    def _is_path(self, node: cst.SimpleString) -> bool:
        argument = self._file.parent(node)
        call = None if argument is None else self._file.parent(argument)
        if not isinstance(call, cst.Call) or call.args[0] is not argument:
            return False
        return dotted_name(call.func).rpartition(".")[2] in _TAKE_PATHS

    def _rewrite_path(self, node: cst.SimpleString, path: str) -> None:
        ours = counterpart(path)
        if ours is None:
            self._file.findings.append(missing(missing_part(path), self._file.line(node)))
        else:
            self._put(node, ours)

    def _rewrite_launcher(self, node: cst.SimpleString, module: str) -> None:
        words = launcher_counterpart(module)
        if words is None:
            _, findings = port_commands(f"-m determined.launch.{module}", self._file.line(node))
            self._file.findings += findings
        elif len(words) == 1:
            self._put(node, words[0])
        elif isinstance(self._file.parent(node), cst.Element | cst.Arg):
            self._file.replace(node, ", ".join(f"{node.prefix}{node.quote}{word}{node.quote}" for word in words))
        else:
            self._file.findings.append(_by_hand(self._file.line(node), module, words))


def _by_hand(line: int, module: str, words: tuple[str, ...]) -> Finding:
    reason = f"determined.launch.{module}: two words replace it, {' '.join(words)}"
    return Finding(line, Severity.problem, reason, "write both into the command")


def _is_dotted_name(node: ast.Attribute) -> bool:
    return all(part.isidentifier() for part in ast.unparse(node).split("."))
