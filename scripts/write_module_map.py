"""Write the map of all modules, docs/project/map.md, from their docstrings; with --check, only compare.

Each room (a directory of modules) gets a table: the file, and the first paragraph of the module's docstring. A
paragraph of the docstring that begins with "Change here:" follows in the same row. A room of more than ten files also
gets a drawing: the modules in rows, where a module imports only modules of lower rows.

    python scripts/write_module_map.py
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "project" / "map.md"
PACKAGES = ("det_lightning", "adapters", "callbacks")
BEGIN = "<!-- map: written by scripts/write_module_map.py -->\n"
END = "<!-- end of map -->\n"
FILES_WITHOUT_DRAWING = 10
DRAWING_WIDTH = 100

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_CHANGE = re.compile(r"^Change here: (.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Module:
    """A file of the product.

    Attributes:
        file: the path from the repository's root.
        name: the name that imports use.
        summary: the first paragraph of the docstring, as Markdown.
        change: what the docstring's "Change here:" says; empty without one.
        imports: the names that the file imports, with the modules that they may be.
    """

    file: Path
    name: str
    summary: str
    change: str
    imports: frozenset[str]


def read_module(file: Path) -> Module:
    """Return what the map says of a file.

    Raises:
        SystemExit: the file has no docstring.
    """
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    if docstring is None:
        sys.exit(f"{file} has no docstring, and the map needs its first line.")
    change = _CHANGE.search(docstring)
    package = file.parts if file.parts[0] == "det_lightning" else ("det_lightning", *file.parts)
    return Module(
        file=file,
        name=".".join(package).removesuffix(".py").removesuffix(".__init__"),
        summary=to_markdown(docstring.split("\n\n")[0]),
        change=to_markdown(change[1]) if change else "",
        imports=read_imports(tree),
    )


def to_markdown(text: str) -> str:
    """Return a paragraph of a docstring as the text of a table's cell."""
    line = " ".join(_ROLE.sub(r"`\1`", text).replace("``", "`").split())
    return line.replace("|", "\\|").replace("<", "&lt;")


def read_imports(tree: ast.Module) -> frozenset[str]:
    """Return the modules that a file may import, at its top or in a function."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return frozenset(found)


def read_rooms() -> dict[Path, list[Module]]:
    """Return the modules of each directory, without those that are reached through a symbolic link."""
    rooms: dict[Path, list[Module]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if not any(folder.is_symlink() for folder in file.parents):
                rooms.setdefault(file.parent.relative_to(ROOT), []).append(read_module(file.relative_to(ROOT)))
    return {folder: rooms[folder] for package in PACKAGES for folder in sorted(rooms) if folder.parts[0] == package}


def draw(room: list[Module]) -> Iterator[str]:
    """Yield the rows of a room's drawing, the modules that others need last."""
    inside = {module.name: module for module in room if module.file.name != "__init__.py"}
    needed = {name: set(module.imports & inside.keys()) - {name} for name, module in inside.items()}
    sorter = graphlib.TopologicalSorter(needed)
    height: dict[str, int] = {}
    for name in sorter.static_order():
        height[name] = 1 + max((height[other] for other in needed[name]), default=0)
    for row in sorted(set(height.values()), reverse=True):
        names = sorted(name.rpartition(".")[2] for name in height if height[name] == row)
        yield from wrap(names)


def wrap(names: list[str]) -> Iterator[str]:
    """Yield the names of one row in lines; the first begins with a bar, and the next are indented."""
    line = "|"
    for name in names:
        if len(line) + len(name) > DRAWING_WIDTH:
            yield line
            line = " "
        line += f"  {name}"
    yield line


def write_map() -> str:
    """Return the whole map."""
    lines: list[str] = []
    for folder, room in read_rooms().items():
        lines += ["", f"## `{folder.as_posix()}/`", ""]
        if len(room) > FILES_WITHOUT_DRAWING:
            lines += ["```text", *draw(room), "```", ""]
        lines += ["| file | what it decides or does |", "|---|---|"]
        for module in room:
            change = f" *Change here:* {module.change}" if module.change else ""
            lines.append(f"| [{module.file.name}](../../{module.file.as_posix()}) | {module.summary}{change} |")
    return "\n".join(lines[1:]) + "\n"


def main() -> int:
    """Return 1 if the page has another map and must not be written."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    written = f"{before}{BEGIN}{write_map()}{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        return int(written != page)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
