"""What a release is made of: one version everywhere, a changelog of the usual form, workflows that run what tox has."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def version() -> str:
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)


def test_citation_names_version() -> None:
    assert f"\nversion: {version()}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_has_usual_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [name for name in sections if not re.fullmatch(r"\[Unreleased\]|\[\d.*\] - \d{4}-\d\d-\d\d", name)] == []
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= set(KINDS)


def test_other_tag_is_refused() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "check_release.py"), "v99.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"pyproject.toml has {version()}" in done.stderr
    assert f"CITATION.cff has {version()}" in done.stderr
    assert "CHANGELOG.md has " in done.stderr


def test_workflows_run_tox_environments() -> None:
    environments = set(re.findall(r"^\[testenv:(\w+)\]$", (ROOT / "tox.ini").read_text(), re.MULTILINE))
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        lists = re.findall(r"^\s+env: \[(.+)\]$", text, re.MULTILINE)
        named = [found.strip() for group in lists for found in group.split(",")]
        named += re.findall(r"tox run -e (\w+)", text) + re.findall(r"\{env: (\w+)", text)
        assert named
        assert [found for found in named if found not in environments] == []
