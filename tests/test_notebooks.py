"""The notebooks of the examples are executed from their first cell to their last, and are kept without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracked import tracked

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; the extra [test] has it")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; nbclient brings it")

NOTEBOOKS = tracked("examples/*/*.ipynb")


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_notebook_runs_and_draws(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "of the held-out digits" in outputs[-1]["data"]["text/plain"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_notebook_has_no_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []
