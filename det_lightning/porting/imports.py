"""Imports and uses of ``determined``, rewritten to ``det_lightning``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import libcst as cst

from det_lightning.parts_of_determined import find_topic
from det_lightning.porting.counterparts import counterpart, missing, missing_prefix
from det_lightning.porting.findings import Need, Premise, Severity
from det_lightning.porting.python_syntax import PythonFile, dotted_name, last_name


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


_VERSION = "det_lightning.__version__"
_READ_VERSIONS = {"LooseVersion", "StrictVersion", "Version", "parse", "parse_version"}
_LONG_STRINGS = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''", re.DOTALL)


class ImportRewriter:
    """Rewrites imports and their uses, except names, and whole files of names, of which no use can be rewritten."""

    def __init__(self, file: PythonFile) -> None:
        self.file = file
        self.bindings = Bindings(file)
        self._left = self._names_to_leave()

    def _names_to_leave(self) -> set[str]:
        by_name: dict[str, list[bool]] = {}
        for path, name in self._find_used_paths():
            by_name.setdefault(name, []).append(counterpart(path) is not None)
        if not self.bindings.uses_trial_api() and not all(known for uses in by_name.values() for known in uses):
            return set(by_name)
        return {name for name, uses in by_name.items() if not any(uses)}

    def _find_used_paths(self) -> Iterator[tuple[str, str]]:
        used = {reference.binding for reference in self.bindings.references}
        for binding in self.bindings.found:
            if (binding not in used and self._is_movable(binding)) or self._is_for_types(binding):
                continue
            if binding.imported != "determined" and (binding not in used or counterpart(binding.imported) is None):
                yield binding.imported, binding.name
            elif binding not in used:
                yield binding.path, binding.name
        for reference in self.bindings.references:
            if not self._is_for_types(reference.binding):
                yield reference.path, reference.binding.name

    def rewrite(self) -> None:
        """Rewrite the file, and note the rest."""
        for statement in dict.fromkeys(binding.statement for binding in self.bindings.found):
            if isinstance(statement, cst.Import):
                self._rewrite_import(statement)
            else:
                self._rewrite_from(statement)
        for star in self.bindings.stars:
            if ours := counterpart(dotted_name(star.module)):
                self.file.replace(star.module or star, ours)
            else:
                self._note_missing(dotted_name(star.module), star)
        for reference in self.bindings.references:
            self._rewrite_use(reference)

    # Import statements

    def _rewrite_import(self, statement: cst.Import) -> None:
        for binding in self.bindings.of(statement):
            ours = counterpart(binding.imported)
            if ours is None:
                self._note_missing_binding(binding)
                if self._is_movable(binding):
                    self.file.remove_lines(statement)
            elif binding.name not in self._left:
                if binding.alias.asname is None and not self.bindings.renameable:
                    # The name determined still stands for the package.
                    ours = "det_lightning as determined" + (f", {ours}" if "." in ours else "")
                self.file.replace(binding.alias.name, ours)

    def _rewrite_from(self, statement: cst.ImportFrom) -> None:
        bindings = self.bindings.of(statement)
        moved = {binding for binding in bindings if self._is_movable(binding) and self._move(binding)}
        kept = [binding for binding in bindings if binding not in moved]
        counterparts = {one: None if one.name in self._left else counterpart(one.path) for one in kept}
        for binding in bindings:
            if counterpart(binding.path) is None:
                self._note_missing_binding(binding)
        targets = {ours.rpartition(".")[0] if ours else None for ours in counterparts.values()}
        if not counterparts:
            self.file.remove_lines(statement)
        elif moved or len(targets) > 1:
            self._split_from(statement, counterparts)
        elif statement.module is not None and (target := targets.pop()) is not None:
            self.file.replace(statement.module, target)
            for binding, ours in counterparts.items():
                name = str(ours).rpartition(".")[2]
                if name != binding.alias.evaluated_name:
                    self.file.replace(binding.alias.name, name if binding.alias.asname else f"{name} as {binding.name}")

    # Missing names, unnecessary for the importers of a trial's file

    def _uses(self, binding: Binding) -> list[Reference]:
        return [use for use in self.bindings.references if use.binding is binding]

    def _is_movable(self, binding: Binding) -> bool:
        """Return whether a missing name is imported on a line of its own and not mentioned in strings."""
        if isinstance(binding.statement, cst.Import):
            is_used = any(use.binding.name == binding.name for use in self.bindings.references)
            if is_used or len(binding.statement.names) > 1:
                return False
        if counterpart(binding.imported) is not None or not self._may_lose(binding):
            return False
        line = self.file.parent(binding.statement)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            return False
        code = _LONG_STRINGS.sub("", self.file.edits.text)
        in_string = re.search(rf"[\"'][^\"'\n]*\b{re.escape(binding.name)}\b[^\"'\n]*[\"']", code)
        return isinstance(self.file.parent(line), cst.Module) and not in_string

    def _is_for_types(self, binding: Binding) -> bool:
        """Return whether a name is missing, and imported for type checkers only."""
        around = [outer for outer in self.file.ancestors(binding.statement) if isinstance(outer, cst.If)]
        return counterpart(binding.path) is None and any(
            last_name(outer.test) == "TYPE_CHECKING"
            and binding.statement in self.file.find(cst.Import, cst.ImportFrom, within=outer.body)
            for outer in around
        )

    def _may_lose(self, binding: Binding) -> bool:
        """Return whether a file can lose a name: a file with a trial, or a script without other missing names."""
        if self.bindings.uses_trial_api():
            return True
        # Nobody imports unused names from a script.
        is_script = self._does_something() or any(map(self._script_around, self.file.find(cst.Comparison)))
        needed = [use.path for use in self.bindings.references]
        imported = [found for found in self.bindings.found if isinstance(found.statement, cst.Import)]
        needed += [found.imported for found in imported if found is not binding]
        return is_script and not self._uses(binding) and not any(counterpart(path) is None for path in needed)

    def _does_something(self) -> bool:
        """Return whether the file has a loop, a ``with`` statement or a call at the top level."""
        top = self.file.module.body
        calls = [line.body[0] for line in top if isinstance(line, cst.SimpleStatementLine)]
        return any(isinstance(one, cst.For | cst.While | cst.With) for one in top) or any(
            isinstance(one, cst.Expr) and isinstance(one.value, cst.Call) for one in calls
        )

    def _move(self, binding: Binding) -> bool:
        """Move the import of a name below ``if __name__ == "__main__"``, or drop an unused import."""
        scripts = {self._script_around(use.node) for use in self._uses(binding)}
        if len(scripts) > 1 or None in scripts:
            return False
        edits = self.file.edits
        for script in scripts:
            assert script is not None
            start, _ = self.file.span(script.body.body[0])
            module = dotted_name(cst.ensure_type(binding.statement, cst.ImportFrom).module)
            alias = self.file.module.code_for_node(binding.alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
            edits.insert(start, f"from {module} import {alias}{edits.newline()}{edits.indentation(start)}")
        return True

    def _script_around(self, node: cst.CSTNode) -> cst.If | None:
        around = [outer for outer in self.file.ancestors(node) if isinstance(outer, cst.If)]
        if not around or not isinstance(around[-1].body, cst.IndentedBlock):
            return None
        is_script = "__name__" in self.file.source(around[-1].test) and around[-1].orelse is None
        return around[-1] if is_script else None

    def _split_from(self, statement: cst.ImportFrom, counterparts: dict[Binding, str | None]) -> None:
        """Write one statement for each new module of the names."""
        groups: dict[str, list[cst.ImportAlias]] = {}
        for binding, ours in counterparts.items():
            module = dotted_name(statement.module)
            alias = binding.alias
            if ours is not None:
                module, _, name = ours.rpartition(".")
                if name != alias.evaluated_name:
                    as_name = alias.asname or cst.AsName(cst.Name(binding.name))
                    alias = alias.with_changes(name=cst.Name(name), asname=as_name)
            groups.setdefault(module, []).append(alias)
        parent = self.file.parent(statement)
        shares_line = isinstance(parent, cst.SimpleStatementLine) and len(parent.body) > 1
        start, _ = self.file.span(statement)
        separator = self.file.edits.newline() + self.file.edits.indentation(start)
        # A line by itself may be part of a command, where a second line would be an error.
        if shares_line or isinstance(parent, cst.SimpleStatementSuite) or "\n" not in self.file.edits.text:
            separator = "; "
        written = []
        for module, aliases in groups.items():
            if not statement.lpar:
                aliases[-1] = aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            source = cst.parse_expression(module)
            one = statement.with_changes(module=source, names=aliases, semicolon=cst.MaybeSentinel.DEFAULT)
            written.append(self.file.module.code_for_node(one))
        self.file.replace(statement, separator.join(written))

    # Uses

    def _rewrite_use(self, use: Reference) -> None:
        if counterpart(use.path) is None and counterpart(use.binding.path) is not None:
            self._note_missing(missing_prefix(use.path), use.node)
        spelled = self._spell(use.binding, [attribute.attr.value for attribute in use.attributes])
        if spelled is None:
            return
        if self._decides_by_version(use):
            advice = "keep only the code for Determined 0.38.1: det_lightning has the same interface"
            reason = "a check of Determined's version, which is now det_lightning's"
            self.file.note(use.node, Severity.check, reason, advice)
        name, new, kept = spelled
        replaced = use.attributes[: len(use.attributes) - kept]
        if name != use.node.value:
            self.file.replace(use.node, name)
        if new != [attribute.attr.value for attribute in replaced]:
            # The rest of a deeper path may be empty, and begins with a dot.
            _, start = self.file.span(use.node)
            _, end = self.file.span([use.node, *replaced][-1])
            self.file.edits.replace(start, end, "".join(f".{attribute}" for attribute in new))

    def _decides_by_version(self, use: Reference) -> bool:
        """Return whether Determined's version is compared, split, or read by something like ``version.parse``."""
        path = counterpart(use.path)
        if path != _VERSION:
            return path in (f"{_VERSION}.split", f"{_VERSION}.startswith")
        for outer in self.file.ancestors(use.expression):
            if isinstance(outer, cst.Comparison):
                return True
            if isinstance(outer, cst.Call):
                return last_name(outer.func) in _READ_VERSIONS
            if isinstance(outer, cst.BaseStatement | cst.BaseSmallStatement):
                break
        return False

    def spell(self, dotted: str) -> str | None:
        """Return the new spelling of a dotted name in a string of code, or None to keep the old spelling."""
        name, *attributes = dotted.split(".")
        binding = next((binding for binding in self.bindings.found if binding.name == name), None)
        spelled = None if binding is None else self._spell(binding, attributes)
        if spelled is None or not attributes:
            return None
        name, new, kept = spelled
        return ".".join([name, *new, *attributes[len(attributes) - kept :]])

    def _spell(self, binding: Binding, old: list[str]) -> tuple[str, list[str], int] | None:
        """Return the new name, the attributes to write after it, and how many of the old attributes to keep."""
        base = counterpart(binding.path)
        if binding.name in self._left or base is None:
            return None
        path = ".".join([binding.path, *old])
        ours = counterpart(path)
        name = binding.name
        if isinstance(binding.statement, cst.Import) and binding.alias.asname is None and self.bindings.renameable:
            # A staying statement may import the path, and bind determined.
            bound = [one.imported for one in self.bindings.found if one.alias.asname is None]
            left = [module for module in bound if counterpart(module) is None]
            if ours is None and any(f"{module}.".startswith(f"{missing_prefix(path)}.") for module in left):
                return None
            name = "det_lightning"
        if ours is None or not ours.startswith(f"{base}."):
            return name, [], len(old)
        new = ours.removeprefix(f"{base}.").split(".")
        kept = 0
        while kept < min(len(old), len(new)) and old[-1 - kept] == new[-1 - kept]:
            kept += 1
        return name, new[: len(new) - kept], kept

    def _note_missing_binding(self, binding: Binding) -> None:
        """Note an imported name without counterpart; if every use has advice of its own, note the uses."""
        uses = self._uses(binding)
        is_movable = self._is_movable(binding)
        if self._is_for_types(binding):
            reason = f"{binding.path} is imported for type checkers only, and nothing replaces it"
            self.file.note(binding.alias, Severity.note, reason, "remove the import, together with the annotations")
            return
        if not uses and is_movable:
            reason = f"{binding.path} is imported and not used; the import is removed"
            self.file.note(binding.alias, Severity.note, reason, "nothing to do", Premise.changed)
            return
        advised = [use for use in uses if find_topic(use.path) != find_topic(binding.imported)]
        for use in advised:
            self._note_missing(use.path, use.node)
        if not advised or len(advised) < len(uses):
            in_scripts = bool(uses) and all(self._script_around(use.node) for use in uses)
            need = Need.script if (in_scripts and is_movable) or self._script_around(binding.alias) else Need.file
            self.file.findings.append(missing(binding.imported, self.file.line(binding.alias), need))

    def _note_missing(self, path: str, node: cst.CSTNode) -> None:
        need = Need.script if self._script_around(node) else Need.file
        if path.endswith("__"):  # for example __file__: without this line the file runs here
            need = Need.nothing
        self.file.findings.append(missing(path, self.file.line(node), need))
