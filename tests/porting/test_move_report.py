"""The page on a move: what was done and what is left."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from det_lightning.cli.app import app
from det_lightning.porting.requirements import list_installed

PROJECTS = Path(__file__).parent / "projects"


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
    for name in ("classic", "deepspeed"):
        shutil.copytree(PROJECTS / name, name)
    with Path("classic/startup-hook.sh").open("a") as hook:
        hook.write("pip install timm\n")
    assert "Wrote move.html." in port(".", "--report", "move.html").stderr
    assert "To be done by port --write: classic/data.py" in " ".join(Words(Path("move.html").read_text()).found)
    port(".", "--write", "--report", "move.html")
    page = Path("move.html").read_text()
    words = " ".join(Words(page).found)
    assert "5 of 8 entry points should run on det_lightning" in words
    assert "classic/const.yaml should run with `det-lightning run classic/const.yaml classic --hook skip`" in words
    assert "deepspeed/zero.yaml still needs Determined because of deepspeed/model_def.py:2" in words
    assert re.findall('<th scope="col"[^>]*>([^<]*)', page)[-2:] == ["Outcome", "Entry point"]
    assert "Done: classic/data.py" in words
    assert words.count("timm") == 1  # in a project of several configurations
    assert "deepspeed/model_def.py:2 (problem): determined.pytorch.deepspeed.DeepSpeedTrial: DeepSpeedTrial is" in words
    assert "src=" not in page
    assert "http" not in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--write", "--report", "move.pdf"], "The file of the page must end with .html; got move.pdf."),
        (["--write", "--report", "no/move.html"], "There is no directory no for move.html."),
        (["--report", "move.html", "--to", "lightning"], "--to lightning writes a new file"),
    ],
)
def test_wrong_options_write_nothing(options: list[str], message: str) -> None:
    Path("data.py").write_text("import determined\n")
    assert message in port("data.py", *options, ends_with=2).stderr
    assert not Path("move.html").exists()
    assert Path("data.py").read_text() == "import determined\n"
