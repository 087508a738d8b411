"""The names that a file has of det_lightning, and what replaces them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from det_lightning.porting.to_lightning.source import Source, dotted

_LOADER = "det_lightning.pytorch.DataLoader"
_TORCH_LOADER = "torch.utils.data.DataLoader"
# What to do about names that have no counterpart, by their last part.
_ADVICE = {
    "InvalidHP": "raise an error that your search takes for a failed run, instead of InvalidHP",
    "TorchWriter": "self.logger.experiment of a TensorBoardLogger replaces TorchWriter().writer",
    "reset_parameters": "torch draws weights when modules are made; leave reset_parameters() out",
}


def advice_for(path: str) -> str:
    """Return what replaces a name of det_lightning; empty if nothing is known to."""
    return _ADVICE.get(path.rpartition(".")[2], "")


class Imports:
    """Knows what the names of a file stand for, and rewrites its import statements.

    Args:
        source: the file.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.statements: list[ast.Import | ast.ImportFrom] = []
        self._paths: dict[str, str] = {}
        self._loaders: list[str] = []
        self._needed: set[str] = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._learn(node)

    def _learn(self, node: ast.Import | ast.ImportFrom) -> None:
        module = "" if isinstance(node, ast.Import) else f"{node.module}."
        paths = {alias.asname or alias.name: module + alias.name for alias in node.names}
        ours = {name: path for name, path in paths.items() if path.split(".")[0] == "det_lightning"}
        if ours and not getattr(node, "level", 0):
            self.statements.append(node)
            for name, path in ours.items():
                # import det_lightning.pytorch binds det_lightning
                self._paths[name if path != name else "det_lightning"] = path if path != name else "det_lightning"

    def path_of(self, node: ast.AST) -> str:
        """Return the dotted name in det_lightning that an expression stands for; empty if it is none."""
        first, dot, rest = dotted(node).partition(".")
        return f"{self._paths[first]}{dot}{rest}" if first in self._paths else ""

    def uses(self, tree: ast.AST) -> Iterator[ast.expr]:
        """Yield the expressions of a tree that stand for a name of det_lightning, without parts of one another."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and self.path_of(node):
                parent = self.source.parent(node)
                if not (isinstance(parent, ast.Attribute) and self.path_of(parent)):
                    yield node

    def rewrite_loaders(self) -> None:
        """Use torch's ``DataLoader``, and ``Any`` in annotations."""
        for use in self.uses(self.source.tree):
            path = self.path_of(use)
            if path == _LOADER:
                if isinstance(use, ast.Name):
                    self._loaders.append(use.id)
                else:
                    self._needed.add("import torch")
                    self.source.rewrite(use, _TORCH_LOADER)
            elif self._is_annotation(use):
                self._needed.add("from typing import Any")
                self.source.rewrite(use, "Any")
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and self._is_annotation(node):
                self._rewrite_quoted(node, node.value)

    def _rewrite_quoted(self, node: ast.Constant, text: str) -> None:
        """Do the same in an annotation that is a string."""
        try:
            quoted = ast.parse(text.strip(), mode="eval")
        except SyntaxError:
            return
        new = _QuotedNames(self).visit(quoted)
        if ast.unparse(new) != ast.unparse(ast.parse(text.strip(), mode="eval")):
            self._needed.update(("import torch", "from typing import Any"))
            self.source.rewrite(node, f'"{ast.unparse(new)}"')

    def _is_annotation(self, node: ast.expr) -> bool:
        inner: ast.AST = node
        outer = self.source.parent(node)
        while outer is not None and not isinstance(outer, ast.stmt):
            if isinstance(outer, ast.arg):
                return True
            if isinstance(outer, ast.Call):
                # cast(TorchData, batch)
                return dotted(outer.func).rpartition(".")[2] == "cast" and outer.args[0] is inner
            inner = outer
            outer = self.source.parent(outer)
        if isinstance(outer, ast.FunctionDef):
            return outer.returns is inner
        return isinstance(outer, ast.AnnAssign) and outer.annotation is inner

    def is_rewritten(self, use: ast.expr) -> bool:
        """Return whether a use needs no name of det_lightning any more."""
        return self.path_of(use) == _LOADER or self.source.edits.covers(*self.source.span(use))

    def need(self, statement: str) -> None:
        """Have an import statement in the file."""
        self._needed.add(statement)

    def rewrite(self, remaining: set[str]) -> None:
        """Replace the imports of det_lightning; names that are still in use stay imported.

        Args:
            remaining: those names.
        """
        for name in sorted(set(self._loaders)):
            self._needed.add(
                "from torch.utils.data import DataLoader" + (f" as {name}" if name != "DataLoader" else "")
            )
        if not re.search(r"\bAny\b", self.source.edits.result()):
            self._needed.discard("from typing import Any")
        existing = {
            ast.unparse(node) for node in self.source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        }
        typing = [
            node for node in self.source.tree.body if isinstance(node, ast.ImportFrom) and node.module == "typing"
        ]
        if any(alias.name == "Any" for node in typing for alias in node.names):
            existing.add("from typing import Any")
        new = [statement for statement in sorted(self._needed) if statement not in existing]
        for statement in self.statements:
            kept = [alias for alias in statement.names if (alias.asname or alias.name).split(".")[0] in remaining]
            self.source.rewrite_lines(statement, [*_import_lines(statement, kept), *new])
            new = []
            if kept:
                self.source.note(statement, "what is imported here is used still, and has to be replaced")


class _QuotedNames(ast.NodeTransformer):
    """Replaces names of det_lightning in an annotation: its loader by torch's, all others by ``Any``."""

    def __init__(self, imports: Imports) -> None:
        self._imports = imports

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._replaced(node) or self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._replaced(node) or node

    def _replaced(self, node: ast.AST) -> ast.expr | None:
        if path := self._imports.path_of(node):
            return ast.parse(_TORCH_LOADER if path == _LOADER else "Any", mode="eval").body
        return None


def _import_lines(statement: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> list[str]:
    if not names:
        return []
    if isinstance(statement, ast.Import):
        return [ast.unparse(ast.Import(names=names))]
    return [ast.unparse(ast.ImportFrom(module=statement.module, names=names, level=0))]
