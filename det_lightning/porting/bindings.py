"""The names that a file's imports give to parts of Determined, and where they are used."""

from __future__ import annotations

import dataclasses

import libcst as cst

from det_lightning.porting.counterparts import counterpart
from det_lightning.porting.python_syntax import PythonFile, dotted_name


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """A name given to a part of Determined by an import statement."""

    name: str  # in the file
    path: str  # the imported part, as a dotted name of Determined
    imported: str  # the same, but determined.pytorch where ``import determined.pytorch`` binds ``determined``
    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias  # the binding part of the statement


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """A use of a binding."""

    node: cst.Name
    attributes: list[cst.Attribute]  # for ``a`` in ``a.b.c`` the attributes ``b`` and ``c``
    binding: Binding  # any of several bindings
    certain: bool  # the name cannot stand for anything else

    @property
    def path(self) -> str:
        """The dotted name of the part, as Determined spells it."""
        return ".".join([self.binding.path, *(attribute.attr.value for attribute in self.attributes)])

    @property
    def expression(self) -> cst.Name | cst.Attribute:
        return self.attributes[-1] if self.attributes else self.node


class Bindings:
    """The names imported from ``package``, by Determined's names, with all uses in the file."""

    def __init__(self, file: PythonFile, package: str = "determined") -> None:
        self._file = file
        self._package = package
        self.found: list[Binding] = []
        self.stars: list[cst.ImportFrom] = []  # from determined... import *
        for statement in file.find(cst.Import, cst.ImportFrom):
            self._add(statement)
        self.references = self._references()
        certain = all(use.certain for use in self.references if use.binding.name == "determined")
        # Whether another name can replace ``determined`` wherever it is used.
        self.renameable = certain and not self._is_named_elsewhere()

    def _add(self, statement: cst.Import | cst.ImportFrom) -> None:
        if isinstance(statement, cst.Import):
            for alias in statement.names:
                imported = self._path(dotted_name(alias.name))
                path = imported if alias.asname else "determined"
                if imported:
                    self.found.append(Binding(alias.evaluated_alias or self._package, path, imported, statement, alias))
            return
        module = "" if statement.relative else self._path(dotted_name(statement.module))
        if not module:
            return
        if isinstance(statement.names, cst.ImportStar):
            self.stars.append(statement)
            return
        for alias in statement.names:
            path = f"{module}.{alias.evaluated_name}"
            self.found.append(Binding(alias.evaluated_alias or alias.evaluated_name, path, path, statement, alias))

    def _path(self, module: str) -> str:
        """Return a module of the package by Determined's name, and the empty string for other modules."""
        top, dot, rest = module.partition(".")
        return f"determined{dot}{rest}" if top == self._package else ""

    def _references(self) -> list[Reference]:
        bound: dict[tuple[cst.CSTNode | None, str], Binding] = {
            (binding.statement, binding.name): binding for binding in self.found
        }
        names = {binding.name for binding in self.found}
        references = []
        for node in self._file.names():
            assignments = self._file.assignments(node) if node.value in names else []
            known = [bound[given, node.value] for given in assignments if (given, node.value) in bound]
            if known:
                references.append(Reference(node, self._attributes(node), known[0], len(known) == len(assignments)))
        return references

    def _attributes(self, name: cst.Name) -> list[cst.Attribute]:
        found: list[cst.Attribute] = []
        node: cst.CSTNode = name
        while isinstance(parent := self._file.parent(node), cst.Attribute) and parent.value is node:
            found.append(parent)
            node = parent
        return found

    def _is_named_elsewhere(self) -> bool:
        """Return whether ``global`` or ``__all__`` also mentions the name."""
        if any(item.name.value == "determined" for item in self._file.find(cst.NameItem)):
            return True
        return any(
            '"determined"' in self._file.source(assign).replace("'", '"')
            for assign in self._file.find(cst.Assign)
            if any(dotted_name(target.target) == "__all__" for target in assign.targets)
        )

    def of(self, statement: cst.CSTNode) -> list[Binding]:
        return [binding for binding in self.found if binding.statement is statement]

    def uses_trial_api(self) -> bool:
        """Return whether the file uses a part of Determined's PyTorch API with a counterpart in det_lightning."""
        return any(path.startswith("determined.pytorch") and counterpart(path) for path in self._paths())

    def uses_core_api(self) -> bool:
        """Return whether the file uses Determined's Core API."""
        return any(f"{path}.".startswith("determined.core.") for path in self._paths())

    def _paths(self) -> list[str]:
        """Return the dotted names of all imports and uses, as Determined spells them."""
        paths = [binding.imported for binding in self.found] + [use.path for use in self.references]
        return paths + [self._path(dotted_name(star.module)) for star in self.stars]
