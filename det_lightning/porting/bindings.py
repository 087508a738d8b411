"""Which names of a file stand for parts of Determined, and where they are used."""

from __future__ import annotations

import dataclasses

import libcst as cst

from det_lightning.porting.counterparts import counterpart
from det_lightning.porting.python_syntax import PythonFile, dotted_name


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """A name that an import statement gives to a part of Determined.

    Attributes:
        name: the name in the file.
        path: what it stands for, as a dotted name of Determined.
        imported: what the statement imports: ``determined.pytorch`` where ``import determined.pytorch`` binds
            ``determined``; otherwise the same as ``path``.
        statement: the statement.
        alias: the part of it that binds the name.
    """

    name: str
    path: str
    imported: str
    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """A use of a binding.

    Attributes:
        node: the name.
        attributes: what is taken of it; see :meth:`PythonFile.chain`.
        binding: what it stands for; one of them if there are several.
        certain: it cannot stand for anything else.
    """

    node: cst.Name
    attributes: list[cst.Attribute]
    binding: Binding
    certain: bool

    @property
    def path(self) -> str:
        """What is used, as a dotted name of Determined."""
        return ".".join([self.binding.path, *(attribute.attr.value for attribute in self.attributes)])


class Bindings(cst.CSTVisitor):
    """Finds the bindings of a file and their uses.

    Args:
        file: the file.
        package: the package whose names are looked for; paths begin with ``determined`` in any case.

    Attributes:
        found: all bindings.
        references: their uses.
        stars: statements ``from determined... import *``.
        renameable: the name ``determined`` can be replaced by another one wherever it is used.
    """

    def __init__(self, file: PythonFile, package: str = "determined") -> None:
        super().__init__()
        self._file = file
        self._package = package
        self.found: list[Binding] = []
        self.references: list[Reference] = []
        self.stars: list[cst.ImportFrom] = []
        self.renameable = True
        file.visit(self)
        uses = _Uses(file, self.found)
        file.visit(uses)
        self.references = uses.references
        certain = all(use.certain for use in self.references if use.binding.name == "determined")
        self.renameable = certain and not uses.named_elsewhere

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802 (a method of libcst's)
        for alias in node.names:
            imported = self._path(dotted_name(alias.name))
            if imported:
                name = alias.evaluated_alias or self._package
                path = imported if alias.asname else "determined"
                self.found.append(Binding(name, path, imported, node, alias))

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802 (a method of libcst's)
        module = self._path(dotted_name(node.module))
        if node.relative or not module:
            return
        if isinstance(node.names, cst.ImportStar):
            self.stars.append(node)
            return
        for alias in node.names:
            path = f"{module}.{alias.evaluated_name}"
            self.found.append(Binding(alias.evaluated_alias or alias.evaluated_name, path, path, node, alias))

    def _path(self, module: str) -> str:
        """Return a module of the package by Determined's name, and the empty string for other modules."""
        top, dot, rest = module.partition(".")
        return f"determined{dot}{rest}" if top == self._package else ""

    def of(self, statement: cst.CSTNode) -> list[Binding]:
        """Return the bindings that a statement makes, in their order."""
        return [binding for binding in self.found if binding.statement is statement]

    def uses_trial_api(self) -> bool:
        """Return whether the file uses a part of Determined's PyTorch API that det_lightning has."""
        paths = [binding.imported for binding in self.found] + [use.path for use in self.references]
        paths += [self._path(dotted_name(star.module)) for star in self.stars]
        return any(path.startswith("determined.pytorch") and counterpart(path) for path in paths)


class _Uses(cst.CSTVisitor):
    def __init__(self, file: PythonFile, bindings: list[Binding]) -> None:
        super().__init__()
        self._file = file
        self._by_statement = {(binding.statement, binding.name): binding for binding in bindings}
        self._names = {binding.name for binding in bindings}
        self.references: list[Reference] = []
        self.named_elsewhere = False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 (a method of libcst's)
        if node.value not in self._names or self._is_no_use(node):
            return
        assignments = self._file.assignments(node)
        found = [self._by_statement.get((given, node.value)) for given in assignments]  # type: ignore[arg-type]
        known = [binding for binding in found if binding is not None]
        if known:
            self.references.append(Reference(node, self._file.chain(node), known[0], len(known) == len(found)))

    def _is_no_use(self, node: cst.Name) -> bool:
        parent = self._file.parent(node)
        if isinstance(parent, cst.NameItem):  # global, nonlocal
            self.named_elsewhere |= node.value == "determined"
        return (isinstance(parent, cst.Attribute) and parent.attr is node) or (
            isinstance(parent, cst.Arg) and parent.keyword is node
        )

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 (a method of libcst's)
        if any(dotted_name(target.target) == "__all__" for target in node.targets):
            self.named_elsewhere |= '"determined"' in self._file.source(node).replace("'", '"')
