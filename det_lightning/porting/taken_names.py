"""The names that the files of a project take from one another's modules; a file keeps its imports of such names."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Collection

from det_lightning.porting.bypass_rules import get_name, parse

_STATEMENT = re.compile(r"^\s*[^#\s]", re.MULTILINE)
_MOST_BYTES = 4 * 1024 * 1024


def read_taken_names(file: pathlib.Path, modules: Collection[str]) -> set[str]:
    """Return the names that a Python file or a notebook takes from the project's modules; ``*`` is any name."""
    if file.suffix not in (".py", ".ipynb") or file.stat().st_size > _MOST_BYTES:
        return set()
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".ipynb":
        from det_lightning.porting.notebooks import split_notebook  # imports libcst

        text, _ = split_notebook(text)
    tree = parse(text)
    if not tree.body and _STATEMENT.search(text):  # Python cannot parse the program
        return {"*"}
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    partial = [node for node in imports if isinstance(node, ast.ImportFrom)]
    of_project = [node for node in partial if not node.module or node.module.rpartition(".")[2] in modules]
    aliases = [alias for node in imports for alias in node.names]
    owners = {*modules, *(alias.asname for alias in aliases if alias.name in modules)}
    taken = {alias.name for node in of_project for alias in node.names}
    return taken | {node.attr for node in nodes if isinstance(node, ast.Attribute) and get_name(node.value) in owners}
