"""Python within shell scripts: ``python -c`` and here-documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.porting import FilePort, port_file
from det_lightning.porting.project import port_project


def port_text(directory: Path, name: str, text: str) -> FilePort:
    """Port a file; once more changes nothing."""
    file = directory / name
    file.write_text(text)
    port = port_file(file)
    port.write()
    assert not port_file(file).changed
    return port


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "v=$(python3 -c 'import determined; print(determined.__version__)')\n"),
        ("run.sh", 'python -u -c "\nfrom determined import core\n\nprint(\\"core\\")"; ls\n'),
        ("run.sh", "python - <<'END' | tee log\n# it's here\nfrom determined import core\nEND\nls\n"),
        ("run.sh", "cat > train.py <<-EOF\nfrom determined import core\nEOF\npython train.py\n"),
        ("Makefile", "check:\n\t@python -c 'from determined import core'\n"),
        ("Dockerfile", 'RUN ["python", "-c", "from determined import core"]\n'),
        ("ci.yml", "- run: |\n    python <<E\n    if 1:\n\n      from determined import core\n    E\n    ls\n"),
        ("startup-hook.sh", "python3.8 -c 'from determined import core'\r\n"),
    ],
)
def test_python_in_commands_is_ported(name: str, text: str, tmp_path: Path) -> None:
    port = port_text(tmp_path, name, text)
    assert port.after == text.replace("determined", "det_lightning")
    assert port.findings == []


@pytest.mark.parametrize(
    "text",
    [
        "# python -c 'import determined'\n",
        "cat > notes.txt <<E\nimport determined\nE\n",
        "python train.py <<E\nname: determined\nE\n",
        "grep -c 'import determined' train.py\n",
        "python -c 'import determined_like'\n",
    ],
)
def test_what_is_no_python_stays(text: str, tmp_path: Path) -> None:
    assert not port_text(tmp_path, "run.sh", text).changed


def test_findings_name_the_lines_of_the_script(tmp_path: Path) -> None:
    script = (
        "cd x\npython - <<EOF\n\nfrom determined.pytorch import PyTorchTrial\n"
        "from determined.experimental import client\nclient.login(PyTorchTrial)\nEOF\n"
        'python -c "from determined import $WHAT, core"\n'
        "python -c 'import determined as d; print(d.__file__)'\n"
    )
    port = port_text(tmp_path, "run.sh", script)
    assert "from det_lightning.pytorch import PyTorchTrial\n" in port.after
    assert [f"{found.line}: {found.reason}" for found in port.findings] == [
        "5: determined.experimental.client: it talks to a Determined master",
        "8: not ported: Python that is put together by the shell",
        "9: determined.__file__: there is no counterpart",
    ]


def test_a_script_with_python_that_uses_determined_is_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("python -c 'import determined, sdk'\n")
    Path("sdk.py").write_text("from determined.experimental import client\nclient.login()\n")
    Path("ours.sh").write_text("python -c 'import determined'\n")
    sentences = {entry.port.path.name: entry.sentence for entry in port_project([Path()]).entry_points}
    assert sentences == {
        "ours.sh": "runs with `sh ours.sh`",
        "run.sh": "still needs Determined because of sdk.py:1 (determined.experimental.client: it talks to a "
        "Determined master)",
    }
