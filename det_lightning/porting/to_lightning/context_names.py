"""Which expressions of a trial are its context."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.python_syntax import PythonFile, targets_of
from det_lightning.porting.to_lightning.module_file import attribute_of_self


class ContextNames:
    """The parameter of ``__init__``, and the variables and attributes of ``self`` that it is assigned to."""

    def __init__(self, file: PythonFile, definition: cst.ClassDef, parameter: cst.Param | None) -> None:
        self._file = file
        self.attributes: set[str] = set()
        self._variables: set[cst.CSTNode] = set()  # where they get their value
        if parameter is not None:
            self._variables.add(parameter)
        statements = file.find(cst.Assign, cst.AnnAssign, within=definition)
        while self._find_more(statements):
            pass

    def _find_more(self, statements: list[cst.Assign | cst.AnnAssign]) -> bool:
        """Add what a known name is assigned to; return whether there is more than before."""
        known = len(self._variables) + len(self.attributes)
        for statement in statements:
            is_context = statement.value is not None and self.include(statement.value)
            for target in targets_of(statement) if is_context else []:
                if isinstance(target, cst.Name):
                    self._variables.add(target)
                elif name := attribute_of_self(target):
                    self.attributes.add(name)
        return len(self._variables) + len(self.attributes) > known

    def include(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is the context, and cannot be anything else."""
        if isinstance(node, cst.Name):
            assigned = self._file.assignments(node)
            return bool(assigned) and all(given in self._variables for given in assigned)
        return attribute_of_self(node) in self.attributes
