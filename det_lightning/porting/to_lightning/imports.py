"""The names that a file imports from det_lightning, and what replaces them."""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting.bindings import Bindings, Reference
from det_lightning.porting.python_syntax import dotted_name, rename_in_code, string_of
from det_lightning.porting.to_lightning.module_file import ModuleFile

_LOADER = "determined.pytorch.DataLoader"
_TORCH_LOADER = "torch.utils.data.DataLoader"
_ANY = "from typing import Any"
# What to do about names that have no counterpart, by their last part.
_ADVICE = {
    "InvalidHP": "raise an error that your search takes for a failed run, instead of InvalidHP",
    "TorchWriter": "self.logger.experiment of a TensorBoardLogger replaces TorchWriter().writer",
    "reset_parameters": "torch draws weights when modules are made; leave reset_parameters() out",
}


class Imports:
    """Knows what the names of a file stand for, and rewrites its import statements."""

    def __init__(self, file: ModuleFile) -> None:
        self._file = file
        self._bindings = Bindings(file, "det_lightning")
        self._needed: set[str] = set()

    def rewrite_uses(self) -> None:
        """Use torch's ``DataLoader``, and ``Any`` in annotations."""
        for use in self._bindings.references:
            if use.path == _LOADER and use.attributes:
                self.need("import torch")
                self._file.replace(use.expression, _TORCH_LOADER)
            elif use.path == _LOADER:
                name = use.node.value
                self.need("from torch.utils.data import DataLoader" + (f" as {name}" if name != "DataLoader" else ""))
            elif self._file.is_annotation(use.node):
                self.need(_ANY)
                self._file.replace(use.expression, "Any")
        for quoted in self._file.find(cst.SimpleString):
            code = string_of(quoted)
            if code is not None and self._file.is_annotation(quoted):
                new = rename_in_code(code, self._in_annotation)
                if new != code:
                    self.need("import torch")
                    self.need(_ANY)
                    self._file.replace(quoted, f'"{new}"')

    def _in_annotation(self, name: str) -> str | None:
        first, dot, rest = name.partition(".")
        path = next((binding.path for binding in self._bindings.found if binding.name == first), "")
        if not path:
            return None
        return _TORCH_LOADER if f"{path}{dot}{rest}" == _LOADER else "Any"

    def left_uses(self, within: cst.CSTNode) -> list[Reference]:
        """Return the uses within a node that still need a name of det_lightning."""
        names = set(self._file.names(within=within))
        uses = [use for use in self._bindings.references if use.node in names and use.path != _LOADER]
        return [use for use in uses if not self._file.edits.covers(*self._file.span(use.expression))]

    def need(self, statement: str) -> None:
        self._needed.add(statement)

    def rewrite(self, remaining: set[str]) -> None:
        """Replace the imports of det_lightning, except for the names that are ``remaining`` in use."""
        if not re.search(r"\bAny\b", self._file.edits.result()):
            self._needed.discard(_ANY)
        new = sorted(self._needed - self._existing())
        ours = {binding.alias: binding.name for binding in self._bindings.found}
        for statement in self._statements():
            left = [alias for alias in _aliases(statement) if ours.get(alias) in remaining]
            kept = [alias for alias in _aliases(statement) if alias in left or alias not in ours]
            self._file.replace_statement(statement, [*import_lines(statement, kept), *new])
            new = []
            if left:
                self._file.todo(statement, "these names are still used and must be replaced")

    def _statements(self) -> list[cst.Import | cst.ImportFrom]:
        """Return the imports of det_lightning, those at module level first, where needed names are to be imported."""
        found = dict.fromkeys([*(binding.statement for binding in self._bindings.found), *self._bindings.stars])
        return sorted(found, key=lambda statement: len(list(self._file.ancestors(statement))))

    def _existing(self) -> set[str]:
        existing = set()
        for statement in self._file.find(cst.Import, cst.ImportFrom):
            if isinstance(self._file.parent(self._file.parent(statement) or statement), cst.Module):
                existing.add(self._file.source(statement))
                if isinstance(statement, cst.ImportFrom) and dotted_name(statement.module) == "typing":
                    existing.update(f"from typing import {alias.evaluated_name}" for alias in _aliases(statement))
        return existing


def advice_for(path: str) -> str:
    """Return what replaces a name of det_lightning; empty if nothing is known."""
    return _ADVICE.get(path.rpartition(".")[2], "")


def _aliases(statement: cst.Import | cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def import_lines(statement: cst.Import | cst.ImportFrom, aliases: list[cst.ImportAlias]) -> list[str]:
    """Return an import statement with only these of its names; no lines if there are none."""
    names = [
        alias.evaluated_name + (f" as {alias.evaluated_alias}" if alias.evaluated_alias else "") for alias in aliases
    ]
    if not names:
        return []
    module = "" if isinstance(statement, cst.Import) else f"from {dotted_name(statement.module)} "
    return [f"{module}import {', '.join(names)}"]
