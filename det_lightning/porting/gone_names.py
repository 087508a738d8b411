"""Names removed from today's libraries: an equivalent name is written, any other name becomes a problem."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from det_lightning.porting import ruff_rules
from det_lightning.porting.bindings import Binding, Bindings, Reference
from det_lightning.porting.edits import Edits
from det_lightning.porting.findings import Finding, Premise, Severity, line_at
from det_lightning.porting.gone_table import GoneName, find_packages, find_rows, mentions_gone_name, option_rows
from det_lightning.porting.guards import Guards
from det_lightning.porting.libraries import Libraries
from det_lightning.porting.python_syntax import (
    PythonFile,
    called_method,
    dotted_name,
    list_methods,
    list_parameters,
    read_string,
)

#: The options of this package are renamed in every file of a project.
_WITH_OPTIONS = "transformers"
_GENERATOR = "<generator>"
_YAML_KEY = r"(?:^[ \t-]*|[{,][ \t]*)[\"']?(?=\w+[\"']?[ \t]*:)"  # the text before a key, in blocks and in braces
_RUFF_READS = re.compile(r"\bnumpy\b|\bunittest\b|^[ \t]*from[ \t]+collections[ \t]+import", re.MULTILINE)
_USE = re.compile(r"[^\n,]*")


def may_have_gone_names(text: str, libraries: Libraries) -> bool:
    """Return whether Python source is worth parsing."""
    packages = _find_packages(text, libraries)
    if libraries.takes_options:
        packages.append(_WITH_OPTIONS)
    return bool(_RUFF_READS.search(text)) or mentions_gone_name(text, packages)


def _find_packages(text: str, libraries: Libraries) -> list[str]:
    """Return the packages of the table mentioned by a text, without the project's own packages."""
    return [package for package in find_packages(text) if package not in libraries.shadowed]


def port_gone_names(file: PythonFile, libraries: Libraries) -> None:
    """Rename removed names and note the names without replacement, except where the code checks for a name."""
    port = _GoneNames(file, libraries)
    for package in _find_packages(file.edits.text, libraries):
        port.port_names(package)
    if libraries.takes_options:
        port.port_options()
    if _RUFF_READS.search(file.edits.text):
        port.ask_ruff()


class _GoneNames:
    """Finds the names of the table in a Python file."""

    def __init__(self, file: PythonFile, libraries: Libraries) -> None:
        self._file = file
        self._libraries = libraries
        self._guards = Guards(file)
        self._noted: set[cst.Attribute] = set()
        self._known: set[int] = set()  # the positions of names in the table, to skip ruff's findings there

    def _holds(self, row: GoneName, node: cst.CSTNode) -> bool:
        line = self._file.line(node)
        use = self._guards.find_use(node)
        return row.holds(self._libraries.lack) and not self._guards.hold(line, use, needs_gpu=".cuda." in row.name)

    def _note(self, row: GoneName, node: cst.CSTNode, shown: str, found: re.Match[str]) -> None:
        if self._holds(row, node):
            advice = row.advice or f"use {row.replacement}"
            advice = found.expand(advice) if found.re.groups else advice
            self._file.note(node, row.severity, row.reason(shown), advice, Premise.changed)

    def _rename(self, row: GoneName, node: cst.CSTNode, found: re.Match[str], ending: str = "") -> None:
        if self._holds(row, node):
            self._file.replace(node, found.expand(row.replacement) + ending)

    def port_names(self, package: str) -> None:
        """Port the imports from a package, the uses of the imported names, and the calls."""
        rows = find_rows(package)
        bindings = Bindings(self._file, package)
        paths: dict[cst.CSTNode, str] = {}
        for use in bindings.references:
            path = paths[use.expression] = package + use.path.removeprefix("determined")
            self._check_use(use, path, rows)
        for binding in bindings.found:
            self._check_import(binding, package + binding.imported.removeprefix("determined"), rows)
        for row in (one for one in rows if one.is_attribute and (bindings.found or bindings.stars)):
            self._check_attributes(row)
        of_calls = [row for row in rows if row.given and not row.is_attribute]
        for call, path, own in self._find_calls(paths):
            for row in of_calls:
                if (found := row.path.fullmatch(path)) and not any(map(row.word.fullmatch, own)):
                    self._check_call(row, call, found)

    def _check_use(self, use: Reference, path: str, rows: list[GoneName]) -> None:
        bound = use.binding.path.count(".") + 1
        for row, found in _find_gone(path, rows):
            end = found.group().count(".") + 1
            if end <= bound or (row.still_exists and self._is_type(use.expression)):  # noted at the import, or a type
                continue
            self._known.add(self._file.span(use.node)[0])
            if row.replacement:
                self._rename(row, use.attributes[end - bound - 1].attr, found)
            else:
                self._note(row, use.node, found.group(), found)

    def _is_type(self, node: cst.CSTNode) -> bool:
        """Return whether a node only tells the type of something."""
        around = (outer for outer in self._file.ancestors(node) if isinstance(outer, cst.Call))
        return self._file.is_annotation(node) or any(dotted_name(call.func) == "isinstance" for call in around)

    def _check_import(self, binding: Binding, path: str, rows: list[GoneName]) -> None:
        for row, found in _find_gone(path, rows):
            is_last = found.group() == path and isinstance(binding.statement, cst.ImportFrom)
            if not row.replacement or not is_last:
                self._note(row, binding.alias, found.group(), found)
            elif "." not in row.replacement:
                self._rename(row, binding.alias.name, found, "" if binding.alias.asname else f" as {binding.name}")
            elif row.package != "collections":  # ruff splits such an import
                self._note(row, binding.alias, found.group(), found)

    def _check_attributes(self, row: GoneName) -> None:
        for node in self._file.find(cst.Attribute):
            found = row.word.fullmatch(node.attr.value)
            if found is None or found.group() in self._libraries.defined or node in self._noted:
                continue
            call = self._file.parent(node)
            keywords = [one.keyword for one in call.args if one.keyword] if isinstance(call, cst.Call) else []
            named = [keyword for keyword in keywords if keyword.value == row.keyword]
            is_used = isinstance(self._file.parent(call), cst.Assign | cst.Return | cst.Attribute)
            is_other = (row.keyword and not named) or (row.given.startswith("=") and not is_used)
            if is_other or self._is_imported(dotted_name(node.value).partition(".")[0], node):
                continue
            if row.replacement:
                self._rename(row, named[0] if named else node.attr, found)
            else:
                self._noted.add(node)
                owner = row.name.partition("(")[0].rpartition(".")[2]
                self._note(row, node, f"{owner}.{found.group()}{f'({row.keyword}=)' if named else ''}", found)

    def _is_imported(self, name: str, within: cst.CSTNode) -> bool:
        """Return whether a name stands for a module or for part of a module, rather than for an object."""
        first = next((node for node in self._file.names(within=within) if node.value == name), None)
        given = [] if first is None else self._file.assignments(first)
        return any(isinstance(one, cst.Import | cst.ImportFrom) for one in given)

    def _find_calls(self, paths: dict[cst.CSTNode, str]) -> Iterator[tuple[cst.Call, str, list[str]]]:
        """Yield the calls of the named functions and classes, and of derived classes with parameters of their own."""
        pairs = [(node, base.value) for node in self._file.find(cst.ClassDef) for base in node.bases]
        bases: dict[cst.CSTNode, str] = {node: paths[base] for node, base in pairs if base in paths}
        derived = {node.name.value: node for node, base in pairs if base in paths}
        for call in self._file.find(cst.Call):
            name = dotted_name(call.func)
            path = paths.get(call.func)
            own: list[str] = []
            if name in derived:
                path = bases[derived[name]]
                own = _list_init_parameters(derived[name])
            elif path is None and name.rpartition(".")[2] in self._libraries.trainers:
                path = f"{_WITH_OPTIONS}.Trainer"
            elif called_method(call) == "__init__" and self._file.source(call.func).startswith("super("):
                path = next((bases[outer] for outer in self._file.ancestors(call) if outer in bases), None)
            if path is not None:
                yield call, path, own

    def _check_call(self, row: GoneName, call: cst.Call, called: re.Match[str]) -> None:
        name = called.group().rpartition(".")[2]
        keywords = [argument.keyword for argument in call.args if argument.keyword is not None]
        positional = [argument for argument in call.args if argument.keyword is None and not argument.star]
        if row.given.startswith("'"):
            for text in self._file.find(cst.SimpleString, within=call):
                if found := row.word.fullmatch(read_string(text) or ""):
                    self._check_text(row, text, found)
        elif row.given == _GENERATOR:
            if positional and isinstance(positional[0].value, cst.GeneratorExp):
                self._note(row, call, f"{called.group()}() of a generator", called)
        elif row.given.startswith("!"):
            keyword = row.given.strip("!=")
            is_given = keyword in [one.value for one in keywords] or len(positional) > row.before > 0
            if not is_given and not any(argument.star for argument in call.args):
                self._note(row, call, f"{name}() without {keyword}=", called)
        elif named := [(one, found) for one in keywords if (found := row.word.fullmatch(one.value))]:
            if row.replacement:
                self._rename(row, *named[0])
            else:
                self._note(row, call, f"{name}({named[0][1].group()}=)", called)
        elif len(positional) > row.before > 0:
            self._note(row, call, f"{name}({row.word.pattern}=)", called)

    def _check_text(self, row: GoneName, text: cst.SimpleString, found: re.Match[str]) -> None:
        if not row.replacement:
            self._note(row, text, f"'{found.group()}'", found)
        elif self._holds(row, text):
            self._replace_within(text, row, found)

    def _replace_within(self, node: cst.CSTNode, row: GoneName, found: re.Match[str]) -> None:
        self._file.replace(node, self._file.source(node).replace(found.group(), found.expand(row.replacement)))

    def port_options(self) -> None:
        """Port the names, attributes and strings of options, except for options read by the project itself."""
        for node in self._file.find(cst.Name, cst.SimpleString):
            value = node.value if isinstance(node, cst.Name) else read_string(node) or ""
            for row in option_rows():
                found = row.word.fullmatch(value.removeprefix("--"))
                if found is None or found.group() in self._libraries.own or not row.holds(self._libraries.lack):
                    continue
                if row.replacement:
                    self._replace_within(node, row, found)
                elif self._stands_for_option(node, value):
                    self._note(row, node, f"{value} of TrainingArguments", found)

    def _stands_for_option(self, node: cst.CSTNode, value: str) -> bool:
        """Return whether a node is an attribute of arguments, or a key in a dict of arguments."""
        parent = self._file.parent(node)
        if isinstance(parent, cst.DictElement):
            return parent.key is node and "TrainingArguments" in self._file.edits.text
        return isinstance(parent, cst.Attribute) and parent.attr is node

    def ask_ruff(self) -> None:
        """Apply ruff's safe fixes, and note the other violations."""
        edits = self._file.edits
        rules = [*ruff_rules.OF_PYTHON, *ruff_rules.OF_NUMPY_1]
        rules += ruff_rules.OF_NUMPY_2 if self._libraries.lack("numpy", "2.0") else ()
        for found in ruff_rules.find_violations(edits.text, rules):
            line = found["location"]["row"]
            at = edits.offset(line, found["location"]["column"] - 1)
            use = _USE.match(edits.text, at)
            if at in self._known or self._guards.hold(line, use.group() if use else ""):
                continue
            fix = found["fix"]
            if fix is not None and fix["applicability"] == "safe" and "\f" not in edits.text:
                _apply(edits, fix["edits"])
            else:
                reason, _, advice = found["message"].replace("`", "").rstrip(".").partition(". ")
                self._file.findings.append(Finding(line, Severity.problem, reason, advice, premise=Premise.changed))


def _apply(edits: Edits, changes: list[dict[str, Any]]) -> None:
    for change in changes:
        start, end = (edits.offset(at["row"], at["column"] - 1) for at in (change["location"], change["end_location"]))
        if edits.text[start:end] != change["content"] and edits.is_free(start, end):
            edits.replace(start, end, change["content"])


def _list_init_parameters(definition: cst.ClassDef) -> list[str]:
    inits = [method for method in list_methods(definition) if method.name.value == "__init__"]
    return [one.name.value for init in inits for one in (*list_parameters(init), *init.params.kwonly_params)]


def _find_gone(path: str, rows: list[GoneName]) -> Iterator[tuple[GoneName, re.Match[str]]]:
    """Yield the first row about a name or about a part of the library around the name, with the match."""
    parts = path.split(".")
    prefixes = [".".join(parts[: end + 1]) for end in range(len(parts))]
    pairs = ((row, row.path.fullmatch(prefix)) for prefix in prefixes for row in rows if not row.given)
    yield from itertools.islice(((row, found) for row, found in pairs if found is not None), 1)


def port_json(text: str, libraries: Libraries) -> tuple[str, list[Finding]]:
    """Return JSON with the options among keys and arguments renamed, and findings for removed options."""
    return port_options(text, libraries, r"(?<!\\)\"(?=\w+\"\s*:)")


def port_options(text: str, libraries: Libraries, key: str = _YAML_KEY) -> tuple[str, list[Finding]]:
    """Return YAML or shell commands with options renamed, and findings for removed options; see also ``port_json``."""
    if not libraries.takes_options:
        return text, []
    edits = Edits(text)
    findings = []
    for row in option_rows():
        pattern = rf"(?:(?<![\w-])--|{key})(?P<option>{row.word.pattern})\b"
        for found in re.finditer(pattern, text, re.MULTILINE) if row.holds(libraries.lack) else ():
            start, end = found.span("option")
            if found["option"] in libraries.own:
                continue
            if row.replacement:
                edits.replace(start, end, row.word.sub(row.replacement, found["option"]))
            else:
                reason = row.reason(f"{found['option']} of TrainingArguments")
                line = line_at(text, start)
                findings.append(Finding(line, row.severity, reason, row.advice, premise=Premise.changed))
    return edits.result(), findings
