"""A survey of a project's files for libraries: pins, imports, and the project's own names and options."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from det_lightning.bypass_rules import get_name, parse
from det_lightning.porting.gone_table import option_rows
from det_lightning.porting.libraries import Libraries, find_pins, normalize

# What takes the options of transformers; in trl everything does.
_TAKES_OPTIONS = re.compile(r"\w*TrainingArguments|HfArgumentParser")
_CODE = (".py", ".ipynb")
_STATEMENT = re.compile(r"^\s*[^#\s]", re.MULTILINE)
_MOST_BYTES = 4 * 1024 * 1024
_SETS = [field.name for field in dataclasses.fields(Libraries) if field.type == "frozenset[str]"]


def read_libraries(
    files: Sequence[pathlib.Path], *, is_whole: bool = True, survey: Callable[..., Libraries] | None = None
) -> Libraries:
    """Survey the files of a project for libraries.

    Args:
        files: all files to survey.
        is_whole: no file outside of ``files`` imports names from the files.
        survey: calls :func:`survey_file`, perhaps in another process. A file that raises an error is left out.
    """
    modules = frozenset({file.stem for file in files} | {file.parent.name for file in files})
    pins: dict[str, str] = {}
    sets: defaultdict[str, frozenset[str]] = defaultdict(frozenset, {} if is_whole else {"taken": frozenset("*")})
    takes_options = False
    for file in files:
        try:
            found = (survey or survey_file)(file, modules)
        except (OSError, ValueError):  # the port of the file says so
            found = Libraries()
        pins |= found.pins
        takes_options = takes_options or found.takes_options
        for name in _SETS:
            sets[name] |= getattr(found, name)
    sets["shadowed"] -= sets["imported"]
    return Libraries(pins, takes_options=takes_options and "transformers" in sets["imported"], **sets)


def survey_file(file: pathlib.Path, modules: Collection[str]) -> Libraries:
    """Survey one file of a project; ``modules`` are the names of the project's modules."""
    if file.stat().st_size > _MOST_BYTES:
        return Libraries(taken=frozenset())
    text = file.read_text(encoding="utf-8", errors="replace")
    is_code = file.suffix in _CODE
    has_pins = file.name == "setup.py" or not (is_code or file.suffix.lower() == ".json")
    pins = {normalize(pin[1]): pin[2] for pin in find_pins(text)} if has_pins else {}
    if not is_code:
        return Libraries(pins, taken=frozenset())
    if file.suffix == ".ipynb":
        from det_lightning.porting.notebooks import split_notebook  # imports libcst

        text, _ = split_notebook(text)
    code = _read_code(text, file, modules)
    return dataclasses.replace(code, pins=pins)


def _read_code(text: str, file: pathlib.Path, modules: Collection[str]) -> Libraries:
    tree = parse(text)
    nodes = list(ast.walk(tree))
    plain = [node for node in nodes if isinstance(node, ast.Import)]
    partial = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in plain for alias in node.names] + [alias for node in partial for alias in node.names]
    imported = {alias.name.partition(".")[0] for node in plain for alias in node.names}
    imported |= {str(node.module).partition(".")[0] for node in partial if not node.level}
    beside = {module for module in imported if _is_beside(file, module)}
    owners = {*modules, *(alias.asname for alias in aliases if alias.name in modules)}
    of_project = [node for node in partial if not node.module or node.module.rpartition(".")[2] in modules]
    taken = {alias.name for node in of_project for alias in node.names}
    taken |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and get_name(node.value) in owners}
    if not tree.body and _STATEMENT.search(text):  # Python cannot parse the program
        taken.add("*")
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = {alias.name for alias in aliases} | set(map(get_name, nodes))
    return Libraries(
        imported=frozenset(imported - beside),
        shadowed=frozenset(beside),
        takes_options="trl" in imported or any(map(_TAKES_OPTIONS.fullmatch, names)),
        own=frozenset(_find_own_options(nodes, text)),
        defined=frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)),
        trainers=frozenset(node.name for node in classes if "transformers" in imported and _is_trainer(node)),
        taken=frozenset(taken),
    )


def _is_trainer(definition: ast.ClassDef) -> bool:
    """Return whether a class derives from a Trainer, and has no ``__init__`` with an argument ``tokenizer``."""
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    has_tokenizer = any(node.name == "__init__" and "tokenizer" in ast.unparse(node.args) for node in methods)
    return not has_tokenizer and any(get_name(base) in ("Trainer", "Seq2SeqTrainer") for base in definition.bases)


def _find_own_options(nodes: list[ast.AST], text: str) -> set[str]:
    """Return the options defined or read by a program itself, and the options present by old and new name."""
    skipped = {id(node.func) for node in nodes if isinstance(node, ast.Call)}  # methods
    skipped |= {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    words = {node.arg for node in nodes if isinstance(node, ast.arg)}
    words |= {get_name(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            words.add(node.value.removeprefix("--").replace("-", "_"))
        elif isinstance(node, ast.Attribute) and id(node) not in skipped and not get_name(node.value).endswith("args"):
            words.add(node.attr)
    both = {
        found.group()
        for row in option_rows()
        for found in row.word.finditer(text)
        if row.replacement and re.search(rf"\b{found.expand(row.replacement)}\b", text)
    }
    return both | {word for word in words if any(row.word.fullmatch(word) for row in option_rows())}


def _is_beside(file: pathlib.Path, module: str) -> bool:
    """Return whether Python finds a module of the project when a file imports the module."""
    roots = [directory for directory in file.parents if not (directory / "__init__.py").is_file()]
    return any((root / name).is_file() for root in roots for name in (f"{module}.py", f"{module}/__init__.py"))
