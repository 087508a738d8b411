"""How the project speaks: how often it points at things rather than naming them, and functions that are not verbs."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("det_lightning", "adapters", "callbacks")

#: Words that point at a thing. One of them now and then is plain English; several in a sentence make a riddle.
POINTING = " what whatever which that those whose it its itself them they their one ones other others such "
#: The most words of this kind in 100 words.
MOST_IN_DOCSTRINGS = 4.0
MOST_IN_DOCS = 4.5
MOST_IN_README = 4.2
#: The most functions with such names.
MOST_PARTICIPLES = 20
MOST_STUMPS = 20

_IRREGULAR = (
    " begun bound built chosen done drawn driven found given gone held kept known laid led left lost made meant"
    " met paid seen sent shown spent taken told thrown understood worn written "
)
_VERBS_IN_ED = " embed exceed feed need proceed seed shed spread "


def keep_prose(markdown: str) -> str:
    """Return the sentences of a page: without code, tables, headings, comments and addresses."""
    text = re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", ":", "!["))]
    return re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))


def count_pointing(text: str) -> tuple[int, int]:
    """Return how many words of a text point at things, and how many words there are; a piece of code is a word."""
    plain = re.sub(r"``?[^`]+``?", "CODE", text)
    pointing = [word for word in re.findall(r"[A-Za-z]+", plain) if f" {word.lower()} " in POINTING]
    return len(pointing), len(re.findall(r"\S*\w\S*", plain))


def rate(texts: Iterator[str]) -> float:
    """Return how many of 100 words point at things."""
    counts = [count_pointing(text) for text in texts]
    return 100 * sum(found for found, _ in counts) / sum(words for _, words in counts)


@functools.cache
def product_trees() -> list[tuple[Path, ast.Module]]:
    files = [file for package in PRODUCT for file in sorted((ROOT / package).rglob("*.py"))]
    return [
        (file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8")))
        for file in files
        if not any(folder.is_symlink() for folder in file.parents)
    ]


def docstrings() -> Iterator[str]:
    for _, tree in product_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                yield re.sub(r"^\s*>>>.*|^\s*\.\.\. .*", "", text.partition("Example:")[0], flags=re.MULTILINE)


def functions() -> Iterator[tuple[str, str]]:
    """Yield each function of the product that is no property, with its place."""
    for file, tree in product_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
                if not decorators & {"property", "cached_property", "setter"}:
                    yield node.name, f"{file}:{node.lineno} {node.name}"


def is_participle(name: str) -> bool:
    """Say whether a name begins with a participle, as in ``drawn`` and ``_kept_files``."""
    word = name.strip("_").partition("_")[0]
    return f" {word} " in _IRREGULAR or (word.endswith("ed") and f" {word} " not in _VERBS_IN_ED)


def is_stump(name: str) -> bool:
    """Say whether a name ends before its end, as in ``path_of``."""
    return name.rpartition("_")[2] in ("of", "in", "for")


def rate_pages(pages: Iterable[Path]) -> float:
    return rate(keep_prose(page.read_text(encoding="utf-8")) for page in pages)


@pytest.mark.slow
def test_prose_names_things() -> None:
    assert rate(docstrings()) <= MOST_IN_DOCSTRINGS
    assert rate_pages((ROOT / "docs").rglob("*.md")) <= MOST_IN_DOCS
    assert rate_pages([ROOT / "README.md"]) <= MOST_IN_README


@pytest.mark.parametrize(("judge", "most"), [(is_participle, MOST_PARTICIPLES), (is_stump, MOST_STUMPS)])
def test_functions_are_verbs(judge: Callable[[str], bool], most: int) -> None:
    found = [place for name, place in functions() if judge(name)]
    assert len(found) <= most, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [("Return what it was given.", (2, 5)), ("Return the key of ``it``.", (0, 5)), ("That is that.", (2, 3))],
)
def test_pointing_words_are_counted(text: str, found: tuple[int, int]) -> None:
    assert count_pointing(text) == found


def test_code_and_tables_are_no_prose() -> None:
    page = "# It\n\nOne `that`.\n\n| which | it |\n\n```python\nit = that\n```\n\n[Those](it.md)\n"
    assert count_pointing(keep_prose(page)) == (2, 3)


@pytest.mark.parametrize("name", ["drawn", "_kept", "planned_trials", "read_needed"])
def test_participles_are_found(name: str) -> None:
    assert is_participle(name) == (name != "read_needed")
