"""The imports of a module's file: replacements of det_lightning's names, and removal of unused imports."""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting.bindings import Bindings, Reference
from det_lightning.porting.python_syntax import PythonFile, dotted_name, read_string, rename_in_code
from det_lightning.porting.to_lightning.module_file import ModuleFile, list_statements

_LOADER = "determined.pytorch.DataLoader"
_TORCH_LOADER = "torch.utils.data.DataLoader"
_ANY = "from typing import Any"
#: Advice for names without a counterpart, by the last part.
ADVICE = {
    "InvalidHP": "instead of InvalidHP, raise an error that your search counts as a failed run",
    "TorchWriter": "self.logger.experiment of a TensorBoardLogger replaces TorchWriter().writer",
    "reset_parameters": "torch draws weights when modules are made; leave reset_parameters() out",
}


class Imports:
    """Resolves the imported names of a file, and rewrites the import statements."""

    def __init__(self, file: ModuleFile) -> None:
        self._file = file
        self._bindings = Bindings(file, "det_lightning")
        self.needed: set[str] = set()  # statements

    def rewrite_uses(self) -> None:
        """Use torch's ``DataLoader``, and ``Any`` in annotations."""
        for use in self._bindings.references:
            if use.path == _LOADER and use.attributes:
                self.needed.add("import torch")
                self._file.replace(use.expression, _TORCH_LOADER)
            elif use.path == _LOADER:
                alias = "" if use.node.value == "DataLoader" else f" as {use.node.value}"
                self.needed.add(f"from torch.utils.data import DataLoader{alias}")
            elif self._file.is_annotation(use.node):
                self.needed.add(_ANY)
                self._file.replace(use.expression, "Any")
        paths = {binding.name: binding.path for binding in reversed(self._bindings.found)}  # the first of each name

        def rename(name: str) -> str | None:
            first, dot, rest = name.partition(".")
            if first not in paths:
                return None
            return _TORCH_LOADER if f"{paths[first]}{dot}{rest}" == _LOADER else "Any"

        for quoted in self._file.find(cst.SimpleString):
            code = read_string(quoted)
            if code is not None and self._file.is_annotation(quoted):
                new = rename_in_code(code, rename)
                if new != code:
                    self.needed |= {"import torch", _ANY}
                    self._file.replace(quoted, f'"{new}"')

    def left_uses(self, within: cst.CSTNode) -> list[Reference]:
        """Return the uses within a node with names of det_lightning still to be replaced."""
        names = set(self._file.names(within=within))
        uses = [use for use in self._bindings.references if use.node in names and use.path != _LOADER]
        return [use for use in uses if not self._file.edits.covers(*self._file.span(use.expression))]

    def rewrite(self, remaining: set[str]) -> None:
        """Replace the imports of det_lightning, except for the ``remaining`` names."""
        if not re.search(r"\bAny\b", self._file.edits.result()):
            self.needed.discard(_ANY)
        new = sorted(self.needed - self._existing())
        ours = {binding.alias: binding.name for binding in self._bindings.found}
        found = dict.fromkeys([*(binding.statement for binding in self._bindings.found), *self._bindings.stars])
        # Those at module level first, where needed names are to be imported.
        for statement in sorted(found, key=lambda one: len(list(self._file.ancestors(one)))):
            left = [alias for alias in _aliases(statement) if ours.get(alias) in remaining]
            kept = [alias for alias in _aliases(statement) if alias in left or alias not in ours]
            self._file.replace_statement(statement, [*_import_lines(statement, kept), *new])
            new = []
            if left:
                self._file.todo(statement, "these names are still used and must be replaced")

    def _existing(self) -> set[str]:
        existing = set()
        for statement in self._file.find(cst.Import, cst.ImportFrom):
            if isinstance(self._file.parent(self._file.parent(statement)), cst.Module):
                existing.add(self._file.source(statement))
                if isinstance(statement, cst.ImportFrom) and dotted_name(statement.module) == "typing":
                    existing.update(f"from typing import {alias.evaluated_name}" for alias in _aliases(statement))
        return existing


def _aliases(statement: cst.Import | cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def _import_lines(statement: cst.Import | cst.ImportFrom, aliases: list[cst.ImportAlias]) -> list[str]:
    """Return an import statement with the given names only; no lines without names."""
    named = [(alias.evaluated_name, alias.evaluated_alias) for alias in aliases]
    names = ", ".join(f"{name} as {alias}" if alias else name for name, alias in named)
    module = "" if isinstance(statement, cst.Import) else f"from {dotted_name(statement.module)} "
    return [f"{module}import {names}"] if names else []


def remove_unused_imports(file: ModuleFile, before: str) -> None:
    """Remove the imports needed only by code no longer in the file; ``before`` is the old text."""
    gone = _find_used_names(PythonFile(before)) - _find_used_names(file)
    for statement in list_statements(file.module):
        if isinstance(statement, cst.Import | cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
            names = {one: one.evaluated_alias or one.evaluated_name.partition(".")[0] for one in statement.names}
            kept = [alias for alias, name in names.items() if name not in gone]
            if len(kept) < len(names):
                file.replace_statement(statement, _import_lines(statement, kept))


def _find_used_names(file: PythonFile) -> set[str]:
    """Return the names used by code, and the words in strings, because strings may be annotations."""
    imports = [name for node in file.find(cst.Import, cst.ImportFrom) for name in file.names(within=node)]
    used = {name.value for name in set(file.names()) - set(imports)}
    for text in file.find(cst.SimpleString):
        used.update(re.findall(r"\w+", text.value))
    return used
