"""What each file of a project is: its kind, what it imports and starts, and the values of a configuration it reads."""

from __future__ import annotations

import ast
import dataclasses
import enum
import itertools
import math
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from det_lightning.porting.bypass_rules import get_name, parse
from det_lightning.porting.commands import IMPORTED
from det_lightning.porting.counterparts import CORE_CONTEXT

if TYPE_CHECKING:
    from det_lightning.config.document import Document

#: The packages of Determined, also of older releases, and det_lightning.
OF_DETERMINED = (
    "determined", "det_lightning", "determined_cli", "determined_common", "determined_deploy", "model_hub", "pedl",
)  # fmt: skip
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_WORD = re.compile(r"[^\s\"'`,;&|()\[\]]+")
_FILE = re.compile(r"[\w./-]+\.(?:py|sh|ya?ml)")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_DET = re.compile(r"(?:^|[\s;&|(`@!\"'])(?:(?:[^\s;&|(`@!\"']{0,200}/bin/)?det|det-lightning)[\"']?[\s,]+[\"']?[a-z]")
# A directory below that a command enters, and stays in.
_ENTERS = re.compile(r"(?:^|[\n;&\"']|-c)\s*cd\s+(?:\./)?(\w[\w/-]*?)/?\s*(?:&&|[;\n])(?![\s\S]*\bcd\s)")
_FOR_TYPES = re.compile(r"(?:\w+\.)*TYPE_CHECKING")
_LAUNCHED = re.compile(r"-m[\"']?[\s,]+[\"']?(?:determined|det_lightning)\b")

# The package may be imported as a whole, and used as det.pytorch.
_APIS = {"pytorch": re.compile(r"\bpytorch\b"), "core": re.compile(r"\.core\b|\bimport\b[^\n]*\bcore\b")}
_WITH_SEARCHER = {"entrypoint", "hyperparameters"}


HPARAMS = "hyperparameters"
DATA = "data"
# By method of a context: the section that it returns, or the value that it reads.
_SECTIONS = {"get_hparams": HPARAMS, "get_data_config": DATA}
_VALUES = ("get_per_slot_batch_size", "get_global_batch_size")
_CHANGE = {"pop", "setdefault", "update"}
# A value in these is read under a condition only.
_CONDITIONAL = (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.While, ast.Match, ast.Lambda, ast.comprehension)


class Kind(str, enum.Enum):
    """The part of a file in a project."""

    configuration = "configuration"  #: of an experiment
    script = "script"  #: Python to be run
    commands = "commands"  #: for a shell or for make
    notebook = "notebook"
    other = "other"


class Read(NamedTuple):
    """A value that code reads whenever the function around it runs."""

    section: str  # of a configuration
    name: str
    line: int
    owner: str  # the class around; empty outside of classes
    function: str  # the innermost function around, or empty


class Given(NamedTuple):
    """The names to which a section of a configuration gives values."""

    section: str
    names: tuple[str, ...]
    line: int | None


@dataclasses.dataclass(frozen=True)
class Facts:
    """The links from a file to other files of a project."""

    kind: Kind = Kind.other
    imports: tuple[str, ...] = ()  # dotted names of modules; a name after dots is relative
    starts: tuple[str, ...] = ()  # files named in commands
    uses_determined: bool = False  # imports or starts a part of Determined or det_lightning
    apis: frozenset[str] = frozenset()  # the used APIs of Determined or det_lightning: pytorch, core
    imports_determined: bool = False  # under the name determined, after porting
    has_entrypoint: bool = False  # a configuration has an entrypoint
    executes: str = ""  # the file executed directly by a configuration's command
    modules: tuple[str, ...] = ()  # imports run as scripts by commands
    classes: tuple[str, ...] = ()  # module:Class as named in commands
    names: tuple[str, ...] = ()  # names bound by a module of Python; * for unknown names
    slots: int = 1  # of a configuration's trials
    given: tuple[Given, ...] = ()  # values given by a configuration
    reads: tuple[Read, ...] = ()  # values read from a configuration, by lines before porting
    bases: tuple[tuple[str, str], ...] = ()  # each class with each of its bases


def read_python_facts(text: str, kind: Kind = Kind.script) -> Facts:
    """Return the facts in Python source."""
    tree = parse(text)
    imported = list(_find_imports(tree))
    ours = [name for name in imported if name.split(".")[0] in OF_DETERMINED]
    apis = {api for api, name in _APIS.items() if ours and name.search(text)}
    if CORE_CONTEXT.search(text):
        apis.add("core")
    starts: tuple[str, ...] = ()
    if _DET.search(text):
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        starts = tuple(text for text in strings if isinstance(text, str) and _FILE.fullmatch(text))
    return Facts(
        kind if kind is Kind.notebook or any(map(_does_something, tree.body)) else Kind.other,
        tuple(name for name in imported if name not in ours),
        starts=starts,
        uses_determined=bool(ours or starts),
        apis=frozenset(apis),
        imports_determined=any(name.split(".")[0] == "determined" for name in ours),
        names=tuple(sorted(set(_find_bound_names(tree.body)))),
    )


def _find_imports(tree: ast.Module) -> Iterator[str]:
    for node in _find_executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            # A name may be a module of the package.
            yield from (f"{module}{'' if module.endswith('.') else '.'}{alias.name}" for alias in node.names)


def _find_executed(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module, without code for type checkers only."""
    left: list[ast.AST] = [tree]
    for node in left:  # grows
        yield node
        if isinstance(node, ast.If) and _FOR_TYPES.fullmatch(ast.unparse(node.test)):
            left += node.orelse
        else:
            left += ast.iter_child_nodes(node)


def _find_bound_names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names bound by the statements of a module, and ``*`` if any other name may be bound."""
    for statement in statements:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield "*" if statement.name == "__getattr__" else statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
        else:
            stored = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            yield from (node.id for node in stored if isinstance(node.ctx, ast.Store))
            yield from ("*" for node in stored if node.id in ("exec", "globals", "setattr"))
            inner = [*ast.iter_child_nodes(statement)]
            yield from _find_bound_names(child for child in inner if isinstance(child, ast.stmt))
            handlers = [child for child in inner if isinstance(child, ast.ExceptHandler)]
            yield from (name for handler in handlers for name in _find_bound_names(handler.body))


def _does_something(statement: ast.stmt) -> bool:
    """Return whether a module has a top-level statement that makes it a script."""
    if isinstance(statement, ast.If):
        return "__name__" in {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.For | ast.While | ast.With)


def read_yaml_facts(text: str) -> Facts:
    """Return the facts in YAML: in an experiment configuration, or in any other file with commands."""
    from det_lightning.config.yaml_reader import YamlDocument

    document = YamlDocument(text)
    content = document.data
    if not isinstance(content, dict) or "searcher" not in content or not content.keys() & _WITH_SEARCHER:
        named = read_command_facts(text, Kind.other) if _LAUNCHED.search(text) or _DET.search(text) else Facts()
        return dataclasses.replace(named, uses_determined=False)
    entrypoint = content.get("entrypoint") or ""
    command = " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint)
    started = read_command_facts(command, Kind.configuration)
    if entered := _ENTERS.search(command):
        package = entered.group(1).replace("/", ".")
        started = dataclasses.replace(
            started,
            imports=tuple(f"{package}.{name}" for name in started.imports),
            starts=tuple(posixpath.normpath(posixpath.join(entered.group(1), name)) for name in started.starts),
            modules=tuple(f"{package}.{name}" for name in started.modules),
        )
    words = _WORD.findall(command)
    resources = content.get("resources")
    slots = resources.get("slots_per_trial") if isinstance(resources, dict) else 1
    return dataclasses.replace(
        started,
        uses_determined=True,
        has_entrypoint=bool(command),
        executes=words[0] if words and "/" in words[0] and _FILE.fullmatch(words[0]) else "",
        slots=slots if isinstance(slots, int) else 1,
        given=(_find_given(document, HPARAMS), _find_given(document, DATA)),
    )


def _find_given(document: Document, section: str) -> Given:
    values = document.data.get(section)
    return Given(section, tuple(map(str, values)) if isinstance(values, dict) else (), document.lines.find((section,)))


def read_command_facts(text: str, kind: Kind = Kind.commands) -> Facts:
    """Return the facts in shell commands."""
    text = _COMMENT.sub("", text)
    words = _WORD.findall(text)
    modules = tuple(module for option, module in itertools.pairwise(words) if option == "-m")
    classes = tuple(word for word in words if _CLASS.fullmatch(word))
    named = [*modules, *(word.partition(":")[0] for word in classes)]
    own = [name for name in named if name.split(".")[0] not in OF_DETERMINED]
    starts = tuple(word for word in words if _FILE.fullmatch(word))
    uses = _DET.search(text) or _LAUNCHED.search(text) or IMPORTED.search(text)
    return Facts(kind, tuple(own), starts, bool(uses), modules=modules, classes=classes)


def find_reads(text: str) -> tuple[Read, ...]:
    """Return the values read in a Python file, except those that the file also sets or asks for."""
    tree = parse(text)
    sections = _find_variables(tree)
    reads = [*_walk(tree, sections, "", "")]
    known = {*_find_known(tree)}
    return tuple(dict.fromkeys(read for read in reads if read.name not in known))


def list_bases(text: str) -> tuple[tuple[str, str], ...]:
    """Return each class of a file with each of its bases."""
    classes = [node for node in ast.walk(parse(text)) if isinstance(node, ast.ClassDef)]
    return tuple((node.name, get_name(base)) for node in classes for base in node.bases)


def _find_variables(tree: ast.Module) -> dict[str, str]:
    """Return the variables that always hold an unchanged section of the configuration, with that section."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found.setdefault(ast.unparse(target), set()).add(_find_section(node.value, {}))
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, set()).add("")
        elif isinstance(node, ast.Call) and get_name(node.func) in _CHANGE and isinstance(node.func, ast.Attribute):
            found.setdefault(ast.unparse(node.func.value), set()).add("")
    return {name: section for name, (section, *others) in found.items() if section and not others}


def _find_section(node: ast.expr | None, variables: dict[str, str]) -> str:
    """Return the section that an expression stands for, or an empty text."""
    if isinstance(node, ast.Call):
        return _SECTIONS.get(get_name(node.func), "") if not node.args else ""
    if isinstance(node, ast.Attribute) and node.attr == "hparams" and get_name(node.value) == "trial":
        return HPARAMS
    return variables.get(ast.unparse(node), "") if isinstance(node, ast.Name | ast.Attribute) else ""


def _find_known(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file sets or asks for in some section."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield str(getattr(node.slice, "value", ""))
        elif isinstance(node, ast.Compare):
            yield str(getattr(node.left, "value", ""))


def _walk(node: ast.AST, sections: dict[str, str], owner: str, function: str) -> Iterator[Read]:
    """Yield the reads below a node, without those under a condition."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, sections, child.name, "")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            end = _find_exit(child)
            yield from (read for read in _walk(child, sections, owner, child.name) if read.line <= end)
        elif not isinstance(child, _CONDITIONAL) or _is_start(child):
            if (found := _find_read(child, sections)) is not None:
                yield Read(*found, getattr(child, "lineno", 0), owner, function)
            yield from _walk(child, sections, owner, function)


def _find_exit(function: ast.AST) -> float:
    """Return the line of the first conditional return or raise, below which code may not run."""
    choices = [node for node in ast.walk(function) if isinstance(node, (*_CONDITIONAL, ast.For))]
    exits = [inner for node in choices for inner in ast.walk(node) if isinstance(inner, ast.Return | ast.Raise)]
    return min((node.lineno for node in exits), default=math.inf)


def _is_start(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and get_name(getattr(node.test, "left", None)) == "__name__"


def _find_read(node: ast.AST, sections: dict[str, str]) -> tuple[str, str] | None:
    """Return the section and the name that an expression reads, or None."""
    if isinstance(node, ast.Call) and get_name(node.func) in _VALUES:
        return HPARAMS, "global_batch_size"
    if isinstance(node, ast.Call) and get_name(node.func) == "get_hparam" and len(node.args) == 1:
        section, name = HPARAMS, node.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        section, name = _find_section(node.value, sections), node.slice
    else:
        return None
    value = name.value if isinstance(name, ast.Constant) else None
    return (section, value) if section and isinstance(value, str) else None
