"""Python within shell scripts: ``python -c`` and here-documents."""

from __future__ import annotations

import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from det_lightning.porting import port_project
from tests.porting.test_files import port_text


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
        ("startup-hook.sh", "python3.8 -c 'from determined import core'  # det-lightning: ok\r\n"),
        ("run.sh", "python3 - \"$X\" <<'END'\r\nfrom determined import core\r\nEND\r\n"),
        ("run.sh", "cat <<\\END | python3 -u\nfrom determined import core\nEND\n"),
        ("run.sh", "if x; then\n\tpython <<-END\n\tif 1:\n\t  from determined import core\n\tEND\nfi\n"),
        ("run.sh", "python <<END\nfrom determined import core\nx = [$N, ${A}], '$B', \"\\$x `ls`\"\nEND\n"),
        ("run.sh", "python -W ignore -uc 'from determined import core' \"$1\"\n"),
        ("run.sh", "python -c \"from determined import core; print('$HOME', \\\"\\$x\\\", '`ls`')\"\n"),
        ("Makefile", 'check:\n\tpython -c "from determined import core; x = [$(X), $$Y]"\n'),
        ("ci.yml", "run: |\n  python -c 'from determined import core; x = ${{ env.X }}'\n"),
        ("Makefile", "check:\n\t$(PYTHON) -c \"from determined import core; print('$$HOME')\"; \\\n\tls $$(pwd)\n"),
        ("Dockerfile", "RUN ls && \\\n  python \\\n  -c 'from determined import core'\nRUN <<E\npython -c ''\nE\n"),
        ("Makefile", 'a:\n\tpython -c "\\\n\timport determined as d; \\\n\tprint(d.__version__)"\n'),
        ("Dockerfile", "RUN python -c ' \\\n  import determined as d; \\\n  \\\n  print(d)' \\\r\n  && ls\n"),
        ("Dockerfile", "RUN python3 <<E\nfrom determined import core\nE\n"),
        ("ci.yml", 'run: "python -c \\"from determined import core\\""\n'),
        ("ci.yml", "run: >-\n  python -c 'from determined import core'\n  || exit 1\n"),
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
        "python train.py -c 'configs/determined/const 1.yaml'\n",
        "python -m train -c 'configs/determined/const 1.yaml'\n",
        "cat > run.sh <<E && python train.py\necho determined $1\nE\n",
        "cat train.py | ssh host bash <<E\necho determined $1\nE\n",
        "python -c 'import torch; torch.zeros(1).cuda()'\n",
    ],
)
def test_what_is_no_python_stays(text: str, tmp_path: Path) -> None:
    port = port_text(tmp_path, "run.sh", text)
    assert not port.changed
    assert port.findings == []


def test_lines_stay_lines(tmp_path: Path) -> None:
    text = "check:\n\t@python -c 'from determined.pytorch import Trainer, _load'\n"
    assert port_text(tmp_path, "Makefile", text).after == (
        "check:\n\t@python -c 'from det_lightning.pytorch import Trainer; from det_lightning import pytorch as _load'\n"
    )


def test_findings_have_lines_of_the_script(tmp_path: Path) -> None:
    script = (
        "cd x\npython - <<EOF\n\nfrom determined.pytorch import PyTorchTrial\n"
        "from determined.experimental import client\nclient.login(PyTorchTrial)\nEOF\n"
        'python -c "from determined import $WHAT, core"\n'
        "python -c 'import determined as d; print(d.__file__)'\n"
    )
    port = port_text(tmp_path, "run.sh", script)
    assert not port.changed
    assert [f"{found.line}: {found.reason}" for found in port.findings] == [
        "0: left unchanged as a whole, because of line 5 (determined.experimental.client)",
        "5: determined.experimental.client: it talks to a Determined master",
        "8: not ported: Python put together by the shell",
        "9: determined.__file__: there is no counterpart",
    ]


def test_embedded_python_makes_an_entry_point() -> None:
    Path("run.sh").write_text("python -c 'import determined, sdk'\n")
    Path("sdk.py").write_text("from determined.experimental import client\nclient.login()\n")
    Path("ours.sh").write_text("python -c 'import determined'\n")
    sentences = {entry.port.path.name: entry.sentence for entry in port_project([Path()]).entry_points}
    assert sentences == {
        "ours.sh": "should run with `sh ours.sh`",
        "run.sh": "still needs Determined because of sdk.py:1 (determined.experimental.client: it talks to a "
        "Determined master)",
    }


@pytest.mark.slow
@pytest.mark.parametrize("text", ["@", "!", "(", "python -c '", "${{", "pip -", "a/"])
def test_long_lines_take_linear_time(text: str, tmp_path: Path) -> None:
    start = time.process_time()
    line = text * (60_000 // len(text))
    port_text(tmp_path, "startup-hook.sh", f"{line}\n\npython -c '{line}'\n")
    assert time.process_time() - start < 5


PARTS = [
    "python - <<E\n", "python -c '", 'python -c "', 'python -c \\"', "cat > a.py <<-'E'\n", "E\n", "'", '"', '\\"', "`",
    "$", "$$(", ")", "\\\n", "\r\n", "\n", "\t", "  ", "# it's ", "import torch", "x.cuda()", "; ", "| ",
    "pip install ", "if 1:", "\f", "\u2028", "run: |\n  ", "RUN ", "device='cuda'",
]  # fmt: skip
NAMES = st.sampled_from(["a.sh", "a.yaml", "Makefile"])
OF_DETERMINED = ["determined", "import determined as d", "from determined.pytorch import Trainer, _load", "det e list"]


@hypothesis.given(parts=st.lists(st.sampled_from(PARTS), max_size=15), name=NAMES)
@hypothesis.settings(max_examples=60, deadline=None)
def test_other_scripts_stay(parts: list[str], name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not port_text(tmp_path_factory.getbasetemp() / "scripts", name, "".join(parts)).changed


@pytest.mark.slow
@hypothesis.given(parts=st.lists(st.sampled_from(PARTS + OF_DETERMINED), max_size=15), name=NAMES)
@hypothesis.settings(max_examples=300, deadline=None)
def test_a_script_is_ported_once(parts: list[str], name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "".join(parts)
    port = port_text(tmp_path_factory.getbasetemp() / "scripts", name, text)
    if "det" not in text:
        assert not port.changed
