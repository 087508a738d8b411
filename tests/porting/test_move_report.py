"""The page on a move: what was done, what is left, which checks passed."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from det_lightning.cli.app import app
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.move_report import MovedProject
from det_lightning.porting.requirements import list_installed

PROJECTS = Path(__file__).parent / "projects"
CHECKS = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="model_def:PriceTrial" name="is deterministic under a seed"/>
<testcase classname="model_def:PriceTrial" name="resumes exactly">
<failure message="batch 3&#10;differs | &lt;b&gt;">x</failure></testcase>
<testcase classname="model_def:PriceTrial" name="equals Determined"><skipped message="not installed"/></testcase>
</testsuite></testsuites>"""


class Words(HTMLParser):
    """What a reader of a page sees, apart from its style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.partition("<body>")[2])

    def handle_data(self, data: str) -> None:
        self.found += data.split()


def port(*arguments: object, ends_with: int = 0) -> Result:
    result = CliRunner().invoke(app, ["port", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result


@pytest.fixture(autouse=True)
def projects() -> None:
    """Two projects in the working directory, and what was found out about one of them."""
    for name in ("classic", "deepspeed"):
        shutil.copytree(PROJECTS / name, name)
    Path("checks.xml").write_text(CHECKS)


@pytest.mark.parametrize(
    ("hook", "lines"),
    [
        ("pip install -q -U 'timm>=0.9' torch==2.0 && apt-get install -y git", ["timm>=0.9", "torch==2.0"]),
        ("pip install \\\n  timm \\\n  -r more.txt  # why\n", ["timm", "-r more.txt"]),
        ("# pip install nothing\npython -m pip install --target x timm\npip3 install timm", ["timm"]),
        ("pip install git+https://a/b.git#egg=b -i https://x/s", ["git+https://a/b.git#egg=b", "-i https://x/s"]),
        ("pip install $NAME timm > log.txt; pip uninstall x", ["timm"]),
        ("apt-get install -y git", []),
    ],
)
def test_packages_of_hooks_are_requirements(hook: str, lines: list[str]) -> None:
    assert list_installed(hook) == lines


@pytest.mark.slow
def test_page_lists_done_and_left() -> None:
    assert "Wrote move.html." in port(".", "--write", "--report", "move.html", "--checks", "checks.xml").stderr
    page = Path("move.html").read_text()
    words = " ".join(Words(page).found)
    assert "5 of 8 entry points should run on det_lightning" in words
    assert "classic/const.yaml should run with `det-lightning run classic/const.yaml classic --hook skip`" in words
    assert "deepspeed/zero.yaml still needs Determined because of deepspeed/model_def.py:2" in words
    assert re.findall('<th scope="col"[^>]*>([^<]*)', page)[-2:] == ["Outcome", "Check"]
    assert "Done: classic/data.py : 1 line" in words
    assert "deepspeed/model_def.py:2 (problem): determined.pytorch.deepspeed.DeepSpeedTrial: DeepSpeedTrial is" in words
    assert "resumes exactly model_def:PriceTrial batch 3 differs | <b>" in words
    assert "not checked equals Determined" in words
    assert "src=" not in page
    assert "http" not in page


@pytest.mark.slow
def test_markdown_says_the_same() -> None:
    with Path("classic/startup-hook.sh").open("a") as hook:
        hook.write("pip install timm\n")
    port(".", "--report", "move.md", "--checks", "checks.xml")
    lines = Path("move.md").read_text().splitlines()
    assert lines[0] == "# Move to det_lightning: 5 of 8 entry points should run on it"
    sentence = "should run with `det-lightning run classic/const.yaml classic --hook skip`; 1 finding to look at"
    assert f"| classic/const.yaml | should run | {sentence} |" in lines
    assert "To be done by `port --write`:" in lines
    assert "- classic/data.py: 1 line" in lines
    assert lines.count("    timm") == 1  # in a project of several configurations
    assert r"| failed | resumes exactly: batch 3 differs \| \<b\> | model_def:PriceTrial |" in lines
    # A page without checks says how to make them.
    port("classic", "--report", "move.md")
    assert "`pytest --trial MODULE:CLASS --junitxml checks.xml`" in Path("move.md").read_text()


WRONG = [
    (["--report", "move.pdf"], "The file of the page must end with .html or .md; got move.pdf."),
    (["--report", "no/move.md"], "There is no directory no for move.md."),
    (["--checks", "checks.xml"], "--checks needs --report."),
    (["--report", "move.md", "--checks", "classic/data.py"], "is not a file that pytest --junitxml writes"),
    (["--report", "move.md", "--to", "lightning"], "--to lightning writes a new file"),
]


@pytest.mark.parametrize("encoding", ["foo", "utf-7"])
def test_unreadable_checks_are_named(encoding: str) -> None:
    Path("checks.xml").write_text(f'<?xml version="1.0" encoding="{encoding}"?><testsuite/>')
    said = port("classic", "--report", "move.md", "--checks", "checks.xml", ends_with=2).stderr
    assert "checks.xml is not a file that pytest --junitxml writes" in said


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_write_nothing(options: list[str], message: str) -> None:
    assert message in port("classic", *([] if "--to" in options else ["--write"]), *options, ends_with=2).stderr
    assert not Path("move.md").exists()
    assert "determined" in Path("classic/data.py").read_text()


def test_changed_lines_are_counted() -> None:
    for after, lines in (("b\na\nc\n", 2), ("a\nb\n", 1), ("a\nb\nc", 1), ("a\nB\nC\n", 2)):
        changed = FilePort(Path("data.py"), "a\nb\nc\n", after, [])
        assert MovedProject("", [], [changed]).changed == [(changed, lines)]
