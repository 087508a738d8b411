"""``det-lightning port``: what it prints, what it changes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from det_lightning.cli.app import app
from det_lightning.porting import port_file
from det_lightning.porting.requirements import list_installed
from tests.testing.test_report import Outline

PROJECTS = Path(__file__).parent / "projects"
TRIALS = Path(__file__).parent / "trials"
CODE = "import determined as det\r\ndet.pytorch.PyTorchTrial\n"


def run(*arguments: object, ends_with: int = 0) -> Result:
    """Run ``det-lightning port``; a bug in it is raised here."""
    result = CliRunner().invoke(app, ["port", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project, and things in it that are not a part of it."""
    project = tmp_path / "project"
    for directory in ("", "lib", "venv", ".git", "node_modules/x", "other"):
        (project / directory).mkdir(parents=True, exist_ok=True)
        (project / directory / "code.py").write_bytes(CODE.encode())
    (project / "other" / "pyvenv.cfg").touch()
    (project / "data.bin").write_bytes(b"determined\0")
    (project / "run.sh").write_text("det e logs 3\n")
    return project


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_code_in_checkpoints_stays(project: Path) -> None:
    for number, files in enumerate(
        (
            ("metadata.json", "state_dict.pth"),
            ("load_data.json", "state_dict.pth"),
            ("metadata.json", "checkpoint.pt"),
            ("determined/state_dict.pth",),
            ("events.jsonl", "config.json"),
        )
    ):
        for name in (*files, "code/model_def.py"):
            file = project / "records" / str(number) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(CODE)
    before = contents(project / "records")
    run(project, "--write")
    assert contents(project / "records") == before
    # It is ported where it is named itself.
    run(project / "records" / "0" / "code", "--write")
    assert contents(project / "records") != before


@pytest.mark.slow
def test_the_default_is_a_patch(project: Path, tmp_path: Path) -> None:
    before = contents(project)
    result = run(project)
    assert result.stdout_bytes == run(project, "--diff").stdout_bytes
    assert contents(project) == before
    assert result.stderr.endswith("2 files to change; left to you: 1 problem.\n")
    apply = ["git", "apply", "--unsafe-paths", "-p1", "-"]
    patch = subprocess.run(apply, input=result.stdout_bytes, cwd="/", capture_output=True)
    assert patch.returncode == 0, patch.stderr
    run(project, "--write")
    assert contents(project)["code.py"] == CODE.replace("determined", "det_lightning").encode()


@pytest.mark.slow
def test_write_changes_the_project_only(project: Path) -> None:
    before = contents(project)
    (project / "code.py").chmod(0o755)
    result = run(project, "--write")
    assert f"ported: {project / 'lib' / 'code.py'}\n" in result.stdout
    assert (project / "code.py").stat().st_mode & 0o777 == 0o755
    after = contents(project)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"code.py", "lib/code.py"}
    assert f"{project / 'run.sh'}:1: problem: det e logs: it talks to a Determined master\n" in result.stderr
    assert "0 files changed" in run(project, "--write").stderr


@pytest.mark.parametrize("sign", ["pyvenv.cfg", "bin/activate", "conda-meta/history"])
def test_virtual_environments_are_skipped(sign: str, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "requirements.txt").write_text("determined\n")
    assert "det-lightning" in run(tmp_path).stdout
    (tmp_path / "env" / sign).parent.mkdir(exist_ok=True)
    (tmp_path / "env" / sign).touch()
    assert run(tmp_path).stdout == ""


@pytest.mark.slow
def test_work_left_to_port_is_reported(project: Path, tmp_path: Path) -> None:
    assert "to port: " in run(project, "--check", ends_with=1).stdout
    run(project, "--write")
    run(project, "--check", ends_with=1)  # a problem is left
    (project / "run.sh").unlink()
    run(project, "--check")
    # A note is no reason to fail.
    searcher = "searcher: {name: single, metric: loss}"
    (project / "const.yaml").write_text(f"entrypoint: train.py\n{searcher}\nresources: {{shm_size: 1}}\n")
    assert "const.yaml:3: note: resources.shm_size has no effect" in run(project, "--check").stderr
    ported = tmp_path / "ported"
    ported.mkdir()
    (ported / "code.py").write_text("model.cuda()\n")
    for flags in ([], ["--write"], ["--check"]):
        assert "Nothing to port" in run(ported, *flags).stderr


def test_line_breaks_in_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "code\n+++ b\r.py").write_text(CODE)
    lines = run(tmp_path).stdout.splitlines()
    name = rf"{tmp_path}/code\n+++ b\r.py"
    assert lines[:2] == [f"--- a/{name}", f"+++ b/{name}"]
    assert lines[2].startswith("@@")


def test_json_lists_changes_and_findings(project: Path) -> None:
    files = json.loads(run(project / "run.sh", project, "--json").stdout)["files"]
    reported = {Path(file["path"]).name: file for file in files}
    assert reported["code.py"]["changed"]
    assert "+import det_lightning as det" in reported["code.py"]["diff"]
    (finding,) = reported["run.sh"]["findings"]
    assert (finding["line"], finding["level"]) == (1, "problem")


def test_wrong_arguments_are_usage_errors(project: Path) -> None:
    before = contents(project)
    for arguments, message in (
        ([project, "--write", "--check"], "--write changes files and --check does not"),
        ([project, "--write", "--diff"], "--write changes files and --diff does not"),
        ([project, "--output", "x"], "--output and --force need --to lightning"),
        ([project, "--to", "lightning", "--write"], "--to lightning writes a new file"),
        ([project / "a", project / "b"], f"There is no file or directory {project / 'a'}, {project / 'b'}."),
        ([project / "data.bin"], "data.bin: not a kind of file that can be ported"),
    ):
        result = run(*arguments, ends_with=2)
        assert message in result.stderr
        assert result.stdout == ""
    assert contents(project) == before


@pytest.mark.slow
def test_a_protected_file_is_a_finding(project: Path) -> None:
    (project / "lib" / "code.py").chmod(0o444)
    before = contents(project)
    assert "lib/code.py: problem: not written: it is read-only" in run(project, "--check", ends_with=1).stderr
    result = run(project, "--write")
    assert "lib/code.py: problem: not written: it is read-only" in result.stderr
    assert "1 file changed" in result.stderr
    after = contents(project)
    assert after["lib/code.py"] == before["lib/code.py"]
    assert b"det_lightning" in after["code.py"]


@pytest.mark.slow
def test_links_are_not_written_through(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "code.py").write_bytes(CODE.encode())
    (project / "link.py").symlink_to(outside / "code.py")
    (project / "directory").symlink_to(outside, target_is_directory=True)
    (project / "within.py").symlink_to(project / "code.py")
    (project / "loop.py").symlink_to(project / "loop.py")
    result = run(project, "--write")
    assert f"link.py: problem: not written: it is a link to {outside / 'code.py'}" in result.stderr
    assert "within.py" not in result.output
    assert contents(outside) == {"code.py": CODE.encode()}
    assert (project / "link.py").is_symlink()
    assert b"det_lightning" in (project / "code.py").read_bytes()
    assert "is a link to" in run(project / "link.py", "--write").stderr
    assert contents(outside) == {"code.py": CODE.encode()}


@pytest.mark.slow
def test_other_links_keep_their_content(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.hardlink_to(project / "code.py")
    run(project, "--write")
    assert outside.read_bytes() == CODE.encode()
    assert b"det_lightning" in (project / "code.py").read_bytes()
    (tmp_path / "output.py").symlink_to(outside)
    shutil.copy(TRIALS / "detections.py", project / "trial.py")
    arguments = (project / "trial.py", "--to", "lightning", "-o", tmp_path / "output.py", "--force")
    assert "is a link to" in run(*arguments, ends_with=2).stderr
    assert outside.read_bytes() == CODE.encode()


NESTED = "import determined\nx = " + "[" * 5000 + "]" * 5000 + "\n"


@pytest.mark.slow
def test_deep_nesting_is_a_finding(project: Path) -> None:
    (project / "bad.py").write_text(NESTED)
    (project / "bad.yaml").write_text("entrypoint: determined\nx: " + "[" * 5000 + "]" * 5000)
    (project / "bad.ipynb").write_text("[" * 100_000 + "determined")
    result = run(project, "--write")
    assert f"{project / 'bad.py'}: problem: not ported: it is nested too deeply" in result.stderr
    assert f"{project / 'bad.yaml'}: problem: not ported: it is nested too deeply" in result.stderr
    assert f"{project / 'bad.ipynb'}: problem: not ported: it is nested too deeply" in result.stderr
    assert b"det_lightning" in (project / "code.py").read_bytes()
    assert (project / "bad.py").read_text() == NESTED
    assert "bad.py cannot be read: " in run(project / "bad.py", "--to", "lightning", ends_with=2).stderr


def test_sparse_files_are_not_passed_on(tmp_path: Path) -> None:
    huge, large = tmp_path / "huge.py", tmp_path / "large.py"
    for file, size in ((huge, 2**36), (large, 2**25)):
        file.write_text("import determined\n")
        os.truncate(file, size)
    (finding,) = port_file(huge).findings
    port = port_file(large)
    assert finding.reason == "not ported: it has 68,719,476,736 bytes"
    assert (port.before, port.after, port.findings) == ("", "", [])


def test_the_project_is_never_imported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "libcst", "yaml", "signal"):
        (project / f"{name}.py").write_text("from pathlib import Path; Path(__file__).with_suffix('.ran').touch()")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend("")
    run(".", "--write")
    assert list(project.glob("*.ran")) == []
    assert b"det_lightning" in (project / "code.py").read_bytes()


def test_missing_libraries_are_named(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'libcst' else find(name, *a)\n"
        "sys.argv = ['det-lightning', 'port', '.']\n"
        "from det_lightning.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install -e '.[port]' in a clone" in done.stderr


# The page on a move: what was done and what is left


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
    assert "Wrote move.html." in run(".", "--report", "move.html").stderr
    assert "To be done by port --write: classic/data.py" in Outline(Path("move.html").read_text()).text
    run(".", "--write", "--report", "move.html")
    page = Path("move.html").read_text()
    words = Outline(page).text
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
    assert message in run("data.py", *options, ends_with=2).stderr
    assert not Path("move.html").exists()
    assert Path("data.py").read_text() == "import determined\n"
