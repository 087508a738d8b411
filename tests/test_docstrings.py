"""The examples in the docstrings of public classes and functions: each has one, and they run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from tests.test_public_api import PUBLIC
from tests.versions import needs_shards

#: The trial that examples import.
TRIAL = (ROOT / "tests" / "testing" / "correct_trial.py").read_text().replace("from determined ", "from det_lightning ")


def documented() -> dict[str, Any]:
    """Return the public classes and functions by their paths, each once; errors are described by their messages."""
    found: dict[int, tuple[str, Any]] = {}
    for module_name, names in PUBLIC.items():
        module = importlib.import_module(module_name)
        for name in names.split():
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not is_error:
                found[id(value)] = (f"{module_name}.{name}", value)
    return dict(found.values())


@pytest.fixture
def trial_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A ``model_def`` in the working directory, which is forgotten afterwards."""
    (tmp_path / "model_def.py").write_text(TRIAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("model_def", None)
    yield
    sys.modules.pop("model_def", None)


@pytest.mark.usefixtures("trial_to_import")
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[needs_shards] if "FSDP" in path else []) for path in documented()]
)
def test_examples_run(path: str) -> None:
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(documented()[path]) or "", {}, path, None, 0)
    assert examples.examples, "it has no example"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=report.append, clear_globs=False)
    assert not report, "".join(report)
