"""Hints about installing, which follow whether there is a release, and the porting tool without torch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from det_lightning import missing_parts
from tests.launching import ROOT, environment


def test_hints_follow_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_parts, "IS_PUBLISHED", True)
    assert missing_parts.how_to_install("s3") == "pip install 'det-lightning[s3]'"
    assert missing_parts.explain_requirement() is None
    monkeypatch.setattr(missing_parts, "IS_PUBLISHED", False)
    assert missing_parts.how_to_install("s3") == "pip install -e '.[s3]' in a clone of det_lightning"
    assert "clone" in str(missing_parts.explain_requirement())


def find_modules(packages: list[str]) -> set[str]:
    """Return the top-level modules of distributions and of all that they require."""
    queue = list(packages)
    seen: set[str] = set()
    modules: set[str] = set()
    while queue:
        name = queue.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        modules |= {file.parts[0].removesuffix(".py").partition(".")[0] for file in distribution.files or ()}
        required = map(Requirement, distribution.requires or ())
        queue += [found.name for found in required if found.marker is None or found.marker.evaluate({"extra": ""})]
    return modules


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[".", "--report", "move.html"], ["--to", "lightning", "model_def.py"]])
def test_port_needs_only_documented_packages(arguments: list[str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "porting.md").read_text()
    documented = re.search(r"^pip install --no-deps .*\npip install (.*)$", page, re.MULTILINE).group(1)
    (tmp_path / "model_def.py").write_text((ROOT / "docs" / "examples" / "leaving" / "model_def.py").read_text())
    (tmp_path / "requirements.txt").write_text("determined==0.21\n")
    installed = importlib.metadata.packages_distributions()
    refused = set(installed) - find_modules(documented.split()) - {"det_lightning"}
    assert "torch" in refused
    # Python imports this module at the start of each process, of those of the porting tool too.
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import sys

            class Refusing:
                def find_spec(self, name, path=None, target=None):
                    if name.partition(".")[0] in {sorted(refused)}:
                        raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

            sys.meta_path.insert(0, Refusing())
            """
        )
    )
    command = [sys.executable, "-m", "det_lightning.cli", "port", *arguments]
    variables = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "LightningModule" in done.stdout or "+det-lightning~=" in done.stdout
