"""Print every message of the product in one list: errors, warnings, logs, findings and help texts, with their places.

    python scripts/list_messages.py | less

A value that a message is given is shown as ``{...}``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("det_lightning", "adapters", "callbacks")
#: Functions whose texts people read, by the last part of their names; and words by which errors are known.
SPEAKING = {
    "warn",
    "warning",
    "info",
    "error",
    "exception",
    "echo",
    "debug",
    "critical",
    "Option",
    "Argument",
    "Finding",
}
ERRORS = ("Error", "Exception", "Exit", "Refused", "Failed")


def read_text(node: ast.expr) -> str:
    """Return the text of an expression; '' if there is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(read_text(part) or "{...}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return read_text(node.left) + read_text(node.right)
    return ""


def list_messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message."""
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if id(node) in raised or name in SPEAKING or name.endswith(ERRORS):
            texts = map(read_text, [*node.args, *(keyword.value for keyword in node.keywords)])
            yield from ((node.lineno, " ".join(text.split())) for text in texts if " " in text)


def main() -> None:
    """Print the messages of all modules."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if not any(folder.is_symlink() for folder in file.parents):
                for line, text in sorted(list_messages(ast.parse(file.read_text(encoding="utf-8")))):
                    print(f"{file.relative_to(ROOT)}:{line}: {text}")


if __name__ == "__main__":
    main()
