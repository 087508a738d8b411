"""The source of a trial: its syntax tree, its text, and what becomes of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from det_lightning.porting.edits import Edits


class Source:
    """A Python file that is rewritten.

    Args:
        text: its content.

    Attributes:
        tree: its syntax.
        edits: what is changed.
        todos: number of comments that leave something to the user.

    Raises:
        SyntaxError: it is not Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.edits = Edits(text)
        self.todos = 0
        self._lines = text.splitlines(keepends=True)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._removed: set[ast.stmt] = set()
        self._noted: set[tuple[int, str]] = set()

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        start = self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return start, self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        # Columns are counted in bytes.
        return self.edits.offset(line, len(self._lines[line - 1].encode()[:column].decode()))

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that a node is a part of."""
        return self._parents.get(node)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is in."""
        current: ast.AST | None = node
        while not isinstance(current, ast.stmt):
            assert current is not None, "every expression is in a statement"
            current = self._parents.get(current)
        return current

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        """Return the function that a node is in."""
        current = self._parents.get(node)
        while current is not None and not isinstance(current, ast.FunctionDef):
            current = self._parents.get(current)
        return current

    def render(self, node: ast.AST) -> str:
        """Return the text of a node as changed so far."""
        return self.edits.render(*self.span(node))

    def rewrite(self, node: ast.AST, new: str) -> None:
        """Replace a node, with all changes within it."""
        self.edits.rewrite(*self.span(node), new)

    def indentation(self, statement: ast.stmt) -> str:
        """Return what the line of a statement begins with."""
        return self.edits.indentation(self.span(statement)[0])

    def rewrite_lines(self, statement: ast.stmt, lines: list[str]) -> None:
        """Replace a statement by lines that get its indentation; without any, remove its lines."""
        if lines and self._before(statement):
            self.rewrite(statement, "; ".join(line.partition("  # ")[0] for line in lines))
        elif lines:
            self.rewrite(statement, ("\n" + self.indentation(statement)).join(lines))
        elif self._is_alone(statement):
            self.rewrite(statement, "pass")
        else:
            self._removed.add(statement)
            start = self.edits.offset(statement.lineno, 0)
            if isinstance(statement, ast.FunctionDef):  # and the empty lines before it
                start = len(self.text[:start].rstrip()) + 1
            self.edits.rewrite(start, self.edits.offset((statement.end_lineno or 0) + 1, 0), "")

    def _before(self, statement: ast.stmt) -> str:
        """Return what stands before a statement on its line, but for white space."""
        return self.text[self.edits.offset(statement.lineno, 0) : self.span(statement)[0]].strip()

    def _is_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement shares its lines, or is the only one of a block."""
        end = self.span(statement)[1]
        rest = self.text[end : self.edits.offset((statement.end_lineno or 0) + 1, 0)].strip()
        blocks = [getattr(self.parent(statement), name, None) for name in ("body", "orelse", "finalbody")]
        return bool(self._before(statement) or (rest and not rest.startswith("#"))) or [statement] in blocks

    def dedent(self, node: ast.expr, outer: ast.expr) -> None:
        """Move the lines of an expression to the left, to where an expression around it begins."""
        texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
        if any(text.lineno != text.end_lineno for text in texts) or node.lineno == outer.lineno:
            return
        too_much = len(self.edits.indentation(self.span(node)[0])) - len(self.edits.indentation(self.span(outer)[0]))
        for line in range(node.lineno + 1, (node.end_lineno or 0) + 1):
            start = self.edits.offset(line, 0)
            is_free = self.edits.is_free(start, start + too_much)
            if too_much > 0 and is_free and not self._lines[line - 1][:too_much].strip():
                self.edits.replace(start, start + too_much, "")

    def insert_before(self, definition: ast.ClassDef, text: str) -> None:
        """Put a text before a class of the module's level, and its decorators."""
        line = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
        self.edits.insert(self.edits.offset(line, 0), text, first=True)

    def note(self, node: ast.AST, text: str) -> None:
        """Put a comment above the statement of a node that says what is left to the user."""
        statement = self.statement(node)
        decorators = getattr(statement, "decorator_list", [])
        line = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        if (line, text) not in self._noted:
            self._noted.add((line, text))
            self.todos += 1
            indentation = self.edits.indentation(self.edits.offset(line, 0))
            self.edits.insert(self.edits.offset(line, 0), f"{indentation}# TODO: {text}\n")

    def insert_in_body(self, function: ast.FunctionDef, lines: list[str]) -> None:
        """Put lines at the beginning of a function, after its docstring."""
        first = function.body[0]
        has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if has_docstring and len(function.body) > 1:
            first = function.body[1]
        if first.lineno == function.lineno:  # def f(self): pass
            separator = "\n" + self.indentation(function) + "    "
            self.edits.insert(self.span(first)[0], separator + separator.join([*lines, ""]), first=True)
        else:
            written = "".join(f"{self.indentation(first)}{line}\n" for line in lines)
            self.edits.insert(self.edits.offset(first.lineno, 0), written, first=True)

    def signature(self, function: ast.FunctionDef) -> tuple[int, int]:
        """Return where ``def name(...) -> ...`` begins and ends in the text, without its colon."""
        start = self.text.index("def", self.span(function)[0])
        if function.returns is not None:
            return start, self.span(function.returns)[1]
        given = [node for node in ast.walk(function.args) if isinstance(node, ast.arg | ast.expr)]
        last = max((self.span(node)[1] for node in given), default=start)
        return start, self.text.index(")", last) + 1

    def append_to_class(self, definition: ast.ClassDef, methods: list[list[str]]) -> None:
        """Put methods, each a list of lines, at the end of a class."""
        last = [statement for statement in definition.body if statement not in self._removed][-1]
        indentation = self.indentation(definition.body[0])
        written = ["\n".join(indentation + line if line else "" for line in lines) for lines in methods]
        text = "".join(f"\n\n{method}" for method in written)
        end = self.span(last)[1]
        if not self.edits.is_free(end, end + 1):  # the last line is removed, with its end
            text = text.removeprefix("\n") + "\n"
        self.edits.insert(end, text)


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for names and their attributes, and the empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def attribute_of_self(node: ast.AST | None) -> str:
    """Return ``x`` for ``self.x``, and the empty string for anything else."""
    first, _, rest = dotted(node).partition(".")
    return rest if first == "self" and "." not in rest else ""


def nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions that it defines."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield child
            yield from nodes_of(child)
