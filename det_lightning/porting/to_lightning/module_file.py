"""Edits the file of a trial statement by statement."""

from __future__ import annotations

import itertools

import libcst as cst

from det_lightning.porting.python_syntax import PythonFile, Statement, base_names, dotted_name, is_keyword, last_name


class ModuleFile(PythonFile):
    """A Python file, rewritten statement by statement."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.todos: list[str] = []  # the texts of comments with work for the user
        self._removed: set[Statement] = set()
        self._noted: set[tuple[int, str]] = set()

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the start and the end of a node in the text, including the parentheses of a tuple."""
        if isinstance(node, cst.Tuple | cst.GeneratorExp) and node.lpar:
            return super().span(node.lpar[-1])[0], super().span(node.rpar[0])[1]
        return super().span(node)

    def statement(self, node: cst.CSTNode) -> Statement:
        return next(outer for outer in (node, *self.ancestors(node)) if isinstance(outer, Statement))

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        return next((outer for outer in self.ancestors(node) if isinstance(outer, cst.FunctionDef)), None)

    def is_local(self, name: cst.Name) -> bool:
        """Return whether a name may stand for a variable or parameter of a function."""
        assigned = [node for node in self.assignments(name) if node is not None]
        return any(isinstance(outer, cst.FunctionDef) for node in assigned for outer in self.ancestors(node))

    def render(self, node: cst.CSTNode) -> str:
        """Return the text of a node as changed so far."""
        return self.edits.render(*self.span(node))

    def replace_around(self, node: cst.CSTNode, inner: cst.CSTNode, before: str, after: str) -> None:
        """Replace a node by an inner node between two texts; later changes of the inner node still apply."""
        start, end = self.span(node)
        first, last = self.span(inner)
        self.edits.replace(start, first, before)
        self.edits.replace(last, end, after)

    def indentation(self, statement: Statement) -> str:
        return self.edits.indentation(self.span(statement)[0])

    def replace_statement(self, statement: Statement, lines: list[str]) -> None:
        """Replace a statement by lines with the same indentation; without lines, remove the statement."""
        first = self.edits.offset(self.line(statement), 0)
        last = self.edits.offset(self.end_line(statement) + 1, 0)
        if lines:
            separator = "\n" + self.indentation(statement)
            self.replace(statement, separator.join(lines).replace(f"{separator}\n", "\n\n"))
        elif self._is_needed(statement, first, last):
            self.replace(statement, "pass")
        else:
            self._removed.add(statement)
            if isinstance(statement, cst.FunctionDef):  # and the empty lines before it
                first = len(self.text[:first].rstrip()) + 1
            self.edits.replace(first, last, "")

    def _is_needed(self, statement: Statement, first: int, last: int) -> bool:
        """Return whether a statement shares the lines from ``first`` to ``last``, or is alone in a block."""
        start, end = self.span(statement)
        rest = self.text[end:last].strip()
        block = next(outer for outer in self.ancestors(statement) if isinstance(outer, cst.BaseSuite | cst.Module))
        is_only_one = all(other is statement or other in self._removed for other in list_statements(block))
        return is_only_one or bool(self.text[first:start].strip()) or not (rest == "" or rest.startswith("#"))

    def dedent(self, node: cst.BaseExpression, outer: cst.BaseExpression) -> None:
        """Dedent the lines of an expression to where the enclosing one begins."""
        texts = self.find(cst.SimpleString, cst.FormattedString, within=node)
        is_moved = self.line(node) != self.line(outer)
        if not is_moved or any(self.line(text) != self.end_line(text) for text in texts):
            return
        surplus = len(self.edits.indentation(self.span(node)[0])) - len(self.edits.indentation(self.span(outer)[0]))
        for line in range(self.line(node) + 1, self.end_line(node) + 1):
            start = self.edits.offset(line, 0)
            is_free = self.edits.is_free(start, start + surplus)
            if surplus > 0 and is_free and not self.text[start : start + surplus].strip():
                self.edits.replace(start, start + surplus, "")

    def first_line(self, statement: Statement) -> int:
        """Return the first line of a statement, decorators included."""
        decorators = statement.decorators if isinstance(statement, cst.ClassDef | cst.FunctionDef) else []
        return min([self.line(statement), *(self.line(decorator) for decorator in decorators)])

    def todo(self, node: cst.CSTNode, text: str) -> None:
        """Put a comment with work for the user above the statement of a node."""
        line = self.first_line(self.statement(node))
        if (line, text) not in self._noted:
            self._noted.add((line, text))
            self.todos.append(text)
            start = self.edits.offset(line, 0)
            self.edits.insert(start, f"{self.edits.indentation(start)}# TODO: {text}\n")

    def todo_line(self, text: str) -> str:
        """Return a comment with work for the user, for new code."""
        self.todos.append(text)
        return f"# TODO: {text}"

    def insert_in_body(self, function: cst.FunctionDef, lines: list[str]) -> None:
        """Put lines at the beginning of a function, after the docstring."""
        first, *others = list_statements(function.body)
        if others and isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString):
            first = others[0]
        if isinstance(function.body, cst.SimpleStatementSuite):  # def f(self): pass
            separator = "\n" + self.indentation(function) + "    "
            self.edits.insert(self.span(first)[0], separator + separator.join([*lines, ""]), first=True)
        else:
            written = "".join(f"{self.indentation(first)}{line}\n" for line in lines)
            self.edits.insert(self.edits.offset(self.line(first), 0), written, first=True)

    def replace_signature(self, function: cst.FunctionDef, new: str) -> None:
        """Replace ``def name(...) -> ...``, without the colon."""
        start = self.text.index("def", self.span(function)[0])
        given = [self.span(node)[1] for node in self.find(cst.Param, within=function.params)]
        end = self.text.index(")", max(given, default=start)) + 1
        if function.returns is not None:
            end = self.span(function.returns.annotation)[1]
        self.edits.replace(start, end, new)

    def replace_base(self, definition: cst.ClassDef, old: str, new: str) -> None:
        for base in definition.bases:
            if last_name(base.value) == old:
                self.replace(base.value, new)

    def append_to_class(self, definition: cst.ClassDef, methods: list[list[str]]) -> None:
        body = list_statements(definition.body)
        last = [statement for statement in body if statement not in self._removed][-1]
        indentation = self.indentation(body[0])
        written = ["\n".join(indentation + line if line else "" for line in lines) for lines in methods]
        text = "".join(f"\n\n{method}" for method in written)
        end = self.span(last)[1]
        if not self.edits.is_free(end, end + 1):  # the last line is removed, with its end
            text = text.removeprefix("\n") + "\n"
        self.edits.insert(end, text)


def expand_blocks(text: str) -> str:
    """Return source with one line for each statement of a trial, so that each can be replaced."""
    file = PythonFile(text)
    for trial in file.find(cst.ClassDef):
        if "PyTorchTrial" in base_names(trial):
            for block in file.find(cst.SimpleStatementSuite, cst.SimpleStatementLine, within=trial):
                _expand_block(file, block)
    return file.edits.result()


def _expand_block(file: PythonFile, block: cst.SimpleStatementSuite | cst.SimpleStatementLine) -> None:
    statements = list(block.body)
    spans = [file.span(statement) for statement in statements]
    line = file.edits.indentation(spans[0][0])
    if isinstance(block, cst.SimpleStatementSuite):
        line += file.module.default_indent
        head = file.edits.text[: spans[0][0]].rstrip(" \t\\")
        file.edits.replace(len(head), spans[0][0], "\n" + line)
    for (_, end), (start, _) in itertools.pairwise(spans):
        file.edits.replace(end, start, "\n" + line)
    last = statements[-1].semicolon
    if isinstance(last, cst.Semicolon):
        end = spans[-1][1]
        file.edits.replace(end, file.edits.text.index(";", end) + 1, "")


def list_statements(block: cst.BaseSuite | cst.Module) -> list[Statement]:
    """Return the statements of a block, also where several share a line."""
    found: list[Statement] = []
    for node in block.body:
        if isinstance(node, cst.SimpleStatementLine):
            found += node.body
        elif isinstance(node, Statement):
            found.append(node)
    return found


def attribute_of_self(node: cst.CSTNode | None) -> str:
    """Return ``x`` for ``self.x``, and the empty string for anything else."""
    first, _, rest = dotted_name(node).partition(".")
    return rest if first == "self" and "." not in rest else ""


def argument(call: cst.Call, position: int, name: str) -> cst.BaseExpression | None:
    """Return an argument of a call, passed by position or by name."""
    named = [given.value for given in call.args if is_keyword(given, name)]
    positional = [given.value for given in call.args if given.keyword is None and not given.star]
    return next(iter([*named, *positional[position : position + 1]]), None)
