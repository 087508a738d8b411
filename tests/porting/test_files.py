"""Files of all kinds: what is rewritten in them, and that everything else stays as it is, to the byte."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import det_lightning as det
from det_lightning.porting import FilePort, Severity, port_file
from det_lightning.porting.findings import Need

# What is required of the version, which the tables below write as ~=0.1.
COMPATIBLE = "~=" + ".".join(det.__version__.split(".")[:2])


def port_text(directory: Path, name: str, text: str) -> FilePort:
    """Port a file; once more changes nothing."""
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_bytes(text.encode())
    port = port_file(file)
    port.write()
    assert not port_file(file).changed
    return port


def problems_of(port: FilePort) -> list[str]:
    return [f"{found.line}: {found.reason}" for found in port.findings if found.severity is Severity.problem]


#: By the name of a file, parts of its text and what they become. None stands for the same with det_lightning.
PARTS: dict[str, dict[str, str | None]] = {
    "const.yaml": {
        "a: python3 -m determined.launch.torch_distributed -- python3 t.py  # go": None,
        "b: >-\n  python -m determined.launch.horovod\n   train.py": None,
        "c: python -m determined.launch.autohorovod t": "c: python -m det_lightning.launch.horovod --autohorovod t",
        "d: ['-m', 'determined.launch.autohorovod', t.py]": (
            "d: ['-m', 'det_lightning.launch.horovod', '--autohorovod', t.py]"
        ),
        "e:\n    - -m\n    - determined.launch.autohorovod #": (
            "e:\n    - -m\n    - det_lightning.launch.horovod\n    - --autohorovod #"
        ),
        "f: &a {x: determined.launch, y: determined}\ng: *a": "f: &a {x: determined.launch, y: determined}\ng: *a",
        "h:\n- run: |\n    pip install determined\n    ls": "h:\n- run: |\n    pip install det-lightning\n    ls",
        "i: det e create c.yaml .": "i: det-lightning run c.yaml .",
        "dependencies:\n- pip:\n  - determined==0.17.0 # x": "dependencies:\n- pip:\n  - det-lightning~=0.1 # x",
    },
    "run.sh": {
        "python -m \\\n  determined.launch.torch_distributed t.py": None,
        "python -m determined.launch.horovod -np 2 -- a.py": None,
        "ls determined-0.38.1-py3-none-any.whl": "ls determined-0.38.1-py3-none-any.whl",
        "cd x && det e create c.yaml .": "cd x && det-lightning run c.yaml .",
        'det -m h e create \\\n "a c.yaml" $(x) \\\n --config a=2;': (
            'det-lightning run \\\n "a c.yaml" $(x) \\\n --config a=2;'
        ),
        "nohup det e create c.yaml . >log 2>&1 &": "nohup det-lightning run c.yaml . >log 2>&1 &",
        "det e list 2> /dev/null": "det-lightning experiment ls 2> /dev/null",
        "ssh host 'det e create c.yaml .'": "ssh host 'det-lightning run c.yaml .'",
        "# det e create x .": "# det e create x .",
        "pip install x  # determined, determined-cli": "pip install x  # determined, determined-cli",
        "pip install determined & wait": "pip install det-lightning & wait",
        **dict.fromkeys(["echo the det is 3", "x=det", "detect e create", "echo training det model"]),
        "train --name 'det task a'": None,
    },
    "Makefile": {
        "train:\n\tpython -m determined.launch.torch_distributed train.py": None,
        "train:\n\t@det e create c.yaml .": "train:\n\t@det-lightning run c.yaml .",
        "t: # det e list\n\t-det e list  # det e list": "t: # det e list\n\t-det-lightning experiment ls  # det e list",
    },
    "Dockerfile": {
        'RUN pip3 install -U \\\n  "determined[x]>=0.17,<1" t': 'RUN pip3 install -U \\\n  "det-lightning~=0.1" t',
        'CMD ["python", "-m", "determined.launch.torch_distributed", "t.py"]': None,
    },
    "a.py": {
        "os.system(f'{python} -m determined.launch.torch_distributed {script}')": None,
        "os.system('pip install determined==0.2 && ls')": "os.system('pip install det-lightning~=0.1 && ls')",
        "call(['-m', 'pip', 'install', 'determined', name])": "call(['-m', 'pip', 'install', 'det-lightning', name])",
        "models = ['add', 'determined']": "models = ['add', 'determined']",
        "MODES = ('det', 'model', 'rec')\nrun(['det', 'task', name])": None,
    },
    "requirements.txt": {
        "Determined==0.21": "det-lightning~=0.1",
        "determined [cloud]==0.20": "det-lightning~=0.1",
        "determined == 0.19.2  # pinned\r": "det-lightning~=0.1  # pinned\r",
        "-r model-hub.txt": "-r model-hub.txt",
        "https://x/determined-ai/determined-examples # not it": "https://x/determined-ai/determined-examples # not it",
    },
    "dev-requirements.in": {'determined;python_version>"3"': 'det-lightning;python_version>"3"'},
    "pyproject.toml": {
        '[project]\nname = "determined"': '[project]\nname = "determined"',
        'dependencies = [\n  "x",\n  "determined>=0.17",\n]': 'dependencies = [\n  "x",\n  "det-lightning~=0.1",\n]',
        "requires = [\"determined[x]>=0.2; os < '3'\", 'x']": "requires = [\"det-lightning~=0.1; os < '3'\", 'x']",
        '[tool.ruff]\nk = ["determined"]': '[tool.ruff]\nk = ["determined"]',
        '[project]\n  dependencies = [\n # "determined"\n "determined"]': (
            '[project]\n  dependencies = [\n # "determined"\n "det-lightning"]'
        ),
        '[tool.poetry.dependencies]\n  determined = "^0.2"': '[tool.poetry.dependencies]\n  det-lightning = "~=0.1"',
        '[project.optional-dependencies]\ndetermined = ["determined", "x"]': (
            '[project.optional-dependencies]\ndetermined = ["det-lightning", "x"]'
        ),
    },
    "setup.cfg": {
        "[options]\ninstall_requires =\n determined==0.1 # y": "[options]\ninstall_requires =\n det-lightning~=0.1 # y",
        "[isort]\nknown = determined": "[isort]\nknown = determined",
    },
    "Pipfile": {'[packages]\ndetermined = "*"': '[packages]\ndet-lightning = "*"'},
}


@pytest.mark.parametrize("name", PARTS)
def test_every_kind_of_file_is_ported(name: str, tmp_path: Path) -> None:
    parts = {before: after or before.replace("determined", "det_lightning") for before, after in PARTS[name].items()}
    port = port_text(tmp_path, name, "\n".join([*parts, ""]))
    assert port.after == "\n".join([*parts.values(), ""]).replace("~=0.1", COMPATIBLE)
    assert port.findings == []


HERE = "the launchers of det_lightning run classes in experiments only"
REQUIREMENTS = """\
model_hub
determined-cli==0.12
determined @ git+https://x/y
-e git+https://x/y.git#egg=determined
./determined-0.38.1.tar.gz#sha256=00
git+https://github.com/determined-ai/determined.git@0.38.1#subdirectory=harness
determined==1 \\
  --hash=sha256:00
"""
DEPENDENCIES = """\
[tool.poetry.dependencies]
determined = {version = '1'}
[tool.uv.sources]
determined = [
  {git = 'x'}
]
[tool.uv.sources.determined]
url = 'https://x/determined-0.38.1.whl'
[tool.poetry.group.dev.dependencies.torch]
[tool.poetry.dependencies.determined]
version = '^0.20'
"""


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "a.sh",
            "python -m \\\n  determined.launch.deepspeed t.py\n",
            "2: determined.launch.deepspeed: DeepSp",
        ),
        ("a.yaml", "a:\n- -m\n- determined.launch.tensorflow\n", "3: determined.launch.tensorflow: it is for Tens"),
        (
            "a.yaml",
            "a: >-\n  python -m determined.launch.horovod\n  python -m determined.exec.harness x:Y\n",
            f"3: x:Y: {HERE}",
        ),
        ("a.yaml", "a:\n- -m\n- determined.launch.torch_distributed\n- --trial\n- a:B\n", f"5: a:B: {HERE}"),
        ("a.yaml", "entrypoint: python -m determined.exec.prep_container\n", "1: determined.exec.prep_container: it"),
        ("a.py", "run(['-m', 'determined.exec.harness', 'x:Y'])\n", "1: determined.exec.harness: it needs"),
        ("environment.yaml", "dependencies:\n- determined=0.17\n", "2: conda has no package"),
        ("a.sh", "python -m determined.launch.torch_distributed \\\n  --trial a:B\n", f"2: a:B: {HERE}"),
        (
            "requirements.txt",
            REQUIREMENTS,
            "1: model_hub: it is built on determined, 2: determined-cli: it talks to a Determined master, "
            "3: Determined is installed from a URL, 4: Determined is installed from a URL, "
            "5: Determined is installed from a URL, 6: Determined is installed from a URL, "
            "7: Determined is required with hashes of its files",
        ),
        ("pyproject.toml", "[project]\ndependencies = ['determined @ https://x/d.whl']", "2: Determined is installed"),
        ("a.py", "run(['pip', 'install', 'determined @ https://x/d.whl'])\n", "1: Determined is installed"),
        ("environment.yml", "dependencies:\n- pip:\n  - determined @ https://x/d.whl\n", "3: Determined is installed"),
        (
            "pyproject.toml",
            DEPENDENCIES,
            "2: Determined is required by a table, 4: Determined is required by a table, "
            "7: Determined is required by a table, 10: Determined is required by a table",
        ),
        ("a.py", "x = 1\n\\\nimport determined\n", "0: not ported: it is not Python 3: line 2: a statement begins"),
        ("a.yaml", "entrypoint: {determined\n", "0: not ported: line 2: while parsing a flow mapping"),
        ("a.ipynb", "determined", "0: not ported: not JSON"),
    ],
)
def test_findings_name_line_and_advice(name: str, text: str, reason: str, tmp_path: Path) -> None:
    assert reason in ", ".join(problems_of(port_text(tmp_path, name, text)))


@pytest.mark.parametrize("name", ["a.py", "a.yaml", "a.ipynb"])
def test_other_invalid_files_have_no_findings(name: str, tmp_path: Path) -> None:
    assert port_text(tmp_path, name, "{ : print 'x'").findings == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"import determined\r\nx = 1\n\r\n", b"import det_lightning\r\nx = 1\n\r\n"),
        (codecs.BOM_UTF8 + b"import determined", codecs.BOM_UTF8 + b"import det_lightning"),
        (b"# coding: latin-1\nimport determined # \xe9\n", b"# coding: latin-1\nimport det_lightning # \xe9\n"),
        ("x = 'é𝄞'; import determined\n".encode(), "x = 'é𝄞'; import det_lightning\n".encode()),
        (b"\x0cimport determined\n", b"\x0cimport det_lightning\n"),
    ],
)
def test_encodings_and_line_endings_stay(before: bytes, after: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(before)
    port_file(file).write()
    assert file.read_bytes() == after


@pytest.mark.parametrize(
    "content", [b"import determined # \xe9", b"# coding: nothing\nimport determined", b"determined\0"]
)
@pytest.mark.parametrize("name", ["a.py", "a.yaml", "a.sh"])
def test_binary_files_stay(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert not port_file(tmp_path / name).changed


@pytest.mark.parametrize("codec", ["unicode_escape", "idna", "punycode", "rot13", "undefined"])
def test_irreproducible_encodings_stay(codec: str, tmp_path: Path) -> None:
    """Python has codecs that write another text than they read: one would put all lines into the first comment."""
    port = port_text(tmp_path, "a.py", f"# coding: {codec}\nimport determined\n")
    assert not port.changed
    assert [finding.reason for finding in port.findings] == [f"not ported: it is not encoded as {codec}"]


def notebook(*cells: str) -> str:
    made = [{"cell_type": "code", "metadata": {}, "source": cell.splitlines(keepends=True)} for cell in cells]
    text = {"cell_type": "markdown", "source": ["import determined"]}
    return json.dumps({"cells": [text, *made], "nbformat": 4}, indent=1, ensure_ascii=False) + "\n"


LAYOUTS: list[dict[str, Any]] = [{"indent": indent} for indent in (2, 4, "\t", 0)] + [{"separators": (",", ":")}, {}]


@pytest.mark.parametrize("escapes", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_notebooks_keep_their_layout(layout: dict[str, Any], escapes: bool, tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": "import determined\nprint('é')"}
    text = json.dumps({"cells": [cell], "nbformat": 4}, ensure_ascii=escapes, **layout)
    for before in (text, text.replace("\n", "\r\n")):
        port = port_text(tmp_path, "a.ipynb", before)
        assert port.findings == []
        assert port.after == before.replace("determined", "det_lightning")


OF_ONE_CELL = '{"cells":  [{"cell_type": "code", "source": "import determined"}]}'
FALSE_CELLS = ["determined", None, ["determined"], [{"cell_type": "code", "source": [5]}], [{}, 7]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [(OF_ONE_CELL, "an unknown layout")]
    + [(json.dumps({"cells": cells, "of": "determined"}), "not a notebook of version 4") for cells in FALSE_CELLS],
)
def test_false_notebooks_are_named(text: str, reason: str, tmp_path: Path) -> None:
    assert f"not ported: {reason}" in problems_of(port_text(tmp_path, "a.ipynb", text))[0]


def test_a_comment_resolves_a_finding(tmp_path: Path) -> None:
    text = "from determined.pytorch import PyTorchTrial\nx.cuda()\ny.cuda()  # det-lightning: ok\n"
    assert [found.line for found in port_text(tmp_path, "a.py", text).findings] == [2]


WORDS = [
    "determined", "python -m determined.launch.horovod", "pip install determined==1", "- ", "a: ", "\n", "  ", "#", "'",
    '"', "[options]", "dependencies = [", "]", "\r\n", "\\\n", "{", ",", "é", "det e create",
    "import determined as d", "\t",
]  # fmt: skip
NAMES = ["a.py", "a.yaml", "a.sh", "Dockerfile", "requirements.txt", "pyproject.toml", "setup.cfg", "a.ipynb"]


@hypothesis.given(words=st.lists(st.sampled_from(WORDS), max_size=12), name=st.sampled_from(NAMES))
@hypothesis.settings(max_examples=80)
def test_any_text_is_ported_once(words: list[str], name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = "".join(words)
    port = port_text(tmp_path_factory.getbasetemp() / "fuzz", name, before)
    if "det" not in before:
        assert not port.changed


def test_ignored_fields_are_findings(tmp_path: Path) -> None:
    text = "entrypoint: m:T\nsearcher: {name: single, metric: loss, max_steps: 3}\nresources:\n  shm_size: 1\n"
    found = port_text(tmp_path, "const.yaml", text + "profiling: {enabled: true}\n").findings
    assert [(finding.line, finding.severity.value, finding.reason) for finding in found] == [
        (2, "note", "searcher.max_steps: read as searcher.max_length: {'batches': 300}"),
        (4, "note", "resources.shm_size has no effect under det-lightning run"),
        (5, "check", "profiling has no effect under det-lightning run"),
    ]


def test_refused_fields_are_problems(tmp_path: Path) -> None:
    text = "entrypoint: m:T\nsearcher:\n  name: adaptive\nmax_restart: 3\nscheduling_unit: 0\n"
    reported = problems_of(port_text(tmp_path, "const.yaml", text))
    assert [line.partition(" cannot")[0].partition(";")[0] for line in reported] == [
        "3: searcher.name: adaptive",
        "4: max_restart: unknown key",
        "5: scheduling_unit: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("image", "severity"),
    [
        ("determinedai/environments:cuda-11.3", "note"),
        ("{cuda: determinedai/environments:cuda-11.3, cpu: example.com/ours:3}", "check"),
        ("example.com/ours:3", "check"),
    ],
)
def test_a_custom_image_is_a_check(image: str, severity: str, tmp_path: Path) -> None:
    text = f"entrypoint: a.py\nsearcher: {{name: single, metric: loss}}\nenvironment:\n  image: {image}\n"
    (finding,) = port_text(tmp_path, "const.yaml", text).findings
    assert (finding.line, finding.severity.value) == (4, severity)
    assert finding.reason == "environment.image has no effect under det-lightning run"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", "import os\nos.environ['DET_MASTER']\n", 2),
        ("a.sh", "# DET_MASTER\nexport DET_MASTER=http://localhost\n", 2),
        ("a.yaml", "environment:\n  environment_variables:\n  - DET_MASTER=http://localhost\n", 3),
        ("a.sh", "det -m $DET_MASTER e list\n", None),
        ("a.py", "os.environ['DET_DATA']\n", None),  # of the project
        ("a.yaml", "environment:\n  environment_variables: [DET_CLUSTER_ID=a]\n", None),  # sets it
        ("a.py", "log('DET_MASTER is where the master is')\n", None),
    ],
)
def test_unset_variables_are_findings(name: str, text: str, line: int | None, tmp_path: Path) -> None:
    findings = port_text(tmp_path, name, text).findings
    expected = [] if line is None else [(line, "check", "DET_MASTER: det-lightning run does not set it")]
    assert [(found.line, found.severity.value, found.reason) for found in findings] == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "'/run/determined/workdir'\nsys.path += ['/run/determined/workdir/x']\n"),
        ("a.sh", "# /run/determined/workdir\ncd /run/determined/workdir/x ~/run/determined/y\n"),
        ("a.yaml", "environment:\n  environment_variables: ['PYTHONPATH=/run/determined/workdir/x:.']\n"),
    ],
)
def test_paths_in_containers_are_findings(name: str, text: str, tmp_path: Path) -> None:
    (finding,) = port_text(tmp_path, name, text).findings
    assert (finding.line, finding.severity.value) == (2, "check")
    assert finding.reason == "/run/determined/workdir/x exists in Determined's containers only"


@pytest.mark.parametrize(
    "text",
    [
        "services:\n  master:\n    image: determinedai/determined-master:0.26.0\n    environment: {DET_DB_HOST: db}\n",
        "{{- if .Values.logging }}\nimage: determinedai/determined-master\n{{- end }}\n",
        'determined:\n  host: {{ required "determined" (.Values.host) }}\n',
    ],
)
def test_cluster_files_are_one_note(text: str, tmp_path: Path) -> None:
    port = port_text(tmp_path, "cluster.yaml", text)
    assert [(found.line, found.severity) for found in port.findings] == [(0, Severity.note)]
    assert not port.changed


SEARCHER = "searcher: {name: single, metric: loss, max_length: {batches: 1}}\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"# det -m http://determined-master:8080 e create\n{SEARCHER.replace('single', 'custom')}", "searcher.name"),
        (f"{SEARCHER}bind_mounts:\n- {{host_path: /mnt/determined-db, container_path: /data}}\n", "bind_mounts"),
    ],
)
def test_naming_a_cluster_is_fine(text: str, reason: str, tmp_path: Path) -> None:
    found = port_text(tmp_path, "const.yaml", f"name: x\nentrypoint: m:T\n{text}").findings
    assert any(reason in finding.reason for finding in found)


@pytest.mark.parametrize(
    ("name", "text", "is_found"),
    [
        ("startup-hook.sh", "# set up\nexport X=1\ntrap 'rm -r x' EXIT\npip install timm\n", True),
        ("startup-hook.sh", "pip install timm  # det-lightning: ok\nuv pip install einops\n", False),
        ("setup.sh", "pip install timm\n", False),
    ],
)
def test_a_hook_is_a_finding(name: str, text: str, is_found: bool, tmp_path: Path) -> None:
    ported = port_text(tmp_path, name, text)
    assert ported.after == text
    assert [(found.line, found.severity) for found in ported.findings] == [(0, Severity.check)] * is_found


@pytest.mark.parametrize(
    ("name", "text", "reason", "instead"),
    [
        ("a.sh", "\ndet e create c.yaml . --paused\n", "2: det e create", "det-lightning run CONFIG DIR"),
        ("a.sh", "cd x\ndet -m host e logs -f 1\n", "2: det -m host e logs", "experiment logs EXPERIMENT TRIAL"),
        ("a.sh", "det e create c.yaml . 2>&1 | sed s/x//\n", "1: det e create", "det-lightning run CONFIG DIR"),
        ("a.ipynb", "id = !det e create c.yaml .", "13: det e create", "det-lightning run CONFIG DIR"),
        ("a.py", "x = 1\nos.system('ls; det e kill 3')\n", "2: det e kill", "det-lightning experiment stop"),
        ("a.py", "\nrun(['det', 'c', 'download', uuid])\n", "2: det c download", "det-lightning checkpoint export"),
        ("a.py", "run([\n 'det', 'e',\n 'list', d])\n", "2: det e list", "det-lightning experiment ls"),
        ("a.py", "os.system('det e create ' + c + ' .')\n", "1: det e create", "det-lightning run CONFIG DIR"),
        ("a.py", "\nrun('det e create {} .'.format(c), shell=True)\n", "2: det e create", "det-lightning run CONFIG"),
    ],
)
def test_commands_of_det_have_counterparts(name: str, text: str, reason: str, instead: str, tmp_path: Path) -> None:
    port = port_text(tmp_path, name, notebook(text) if name == "a.ipynb" else text)
    assert not port.changed
    (found,) = port.findings
    assert f"{found.line}: {found.reason}" == f"{reason}: it talks to a Determined master"
    assert found.advice.startswith("in its place: ")
    assert instead in found.advice
    assert found.needs_determined is Need.nothing


@pytest.mark.parametrize(
    ("name", "text", "need"),
    [
        ("a.sh", "det cmd run ls\n", Need.file),
        ("a.sh", "python -m determined.launch.horovod t.py\ndet user login admin\n", Need.file),
    ],
)
def test_commands_for_a_cluster_need_it(name: str, text: str, need: Need, tmp_path: Path) -> None:
    port = port_text(tmp_path, name, text)
    assert not port.changed
    (found,) = [one for one in port.findings if one.severity is Severity.problem]
    assert found.needs_determined is need
    assert found.reason.endswith(": it needs a Determined master")


def test_magic_cells_are_ported(tmp_path: Path) -> None:
    before = notebook(
        "%%time\n!pip install determined\nimport determined\ndetermined?",
        "files = !ls\nif files:\n    !det e create \\\n      c.yaml \\\n      .\n    x, y = %who",
        "%%bash\ncd x\n\n  det e create c.yaml \\\n  .\npython <<E\nif 1:\n  import determined\nE\n",
        "%%writefile train.py\nimport determined\n",
        "%%html\n<p>\n",
        "?x\ndetermined.pytorch.Batch??\ndetermined.core",
    )
    port = port_text(tmp_path, "a.ipynb", before)
    assert port.after == notebook(
        "%%time\n!pip install det-lightning\nimport det_lightning\ndetermined?",
        "files = !ls\nif files:\n    !det-lightning run \\\n      c.yaml \\\n      .\n    x, y = %who",
        "%%bash\ncd x\n\n  det-lightning run c.yaml \\\n  .\npython <<E\nif 1:\n  import determined\nE\n",
        "%%writefile train.py\nimport determined\n",
        "%%html\n<p>\n",
        "?x\ndetermined.pytorch.Batch??\ndet_lightning.core",
    )
    assert [found.reason for found in port.findings] == [
        "a cell that begins with %%writefile stays as it is, and names determined",
        "Python in a command: import determined",
    ]


def test_commands_in_cells_are_translated(tmp_path: Path) -> None:
    logs = "!det e logs 2  # det-lightning: ok\n"
    port = port_text(tmp_path, "a.ipynb", notebook("import os\n!det e create c.yaml .", logs))
    assert port.after == notebook("import os\n!det-lightning run c.yaml .", logs)
    # Other programs than Jupyter write several lines into one text.
    before = notebook("import os\n!det e create c.yaml .", f"{logs}\n!det cmd logs 3")
    for text in (before, before.replace('\\n",\n    "\\n",', '\\n\\n",')):
        port = port_text(tmp_path, "a.ipynb", text)
        note, found = port.findings
        assert port.after == text
        assert note.reason == f"left unchanged as a whole, because of line {found.line} (det cmd logs)"
        assert text.splitlines()[found.line - 1].strip() == '"!det cmd logs 3"'
    loop = "for i in x:\n\tif i:\n\t\t!python train.py \\\n          --lr {i} \\\n\t --fast\n"
    port = port_text(tmp_path, "a.ipynb", notebook("import determined", loop))
    assert port.after == notebook("import det_lightning", loop)
    for end in ("", "\n", "\n\n"):
        assert not port_text(tmp_path, "a.ipynb", notebook(f"import torch\n!ls \\{end}")).changed


@pytest.mark.parametrize(
    "text",
    [
        "searcher: google\n",
        "a: 1\n---\nb: 2\n",
        "description: train the det model on coco\nentrypoint: python3 train.py\n",
    ],
)
def test_other_yaml_stays(text: str, tmp_path: Path) -> None:
    port = port_text(tmp_path, "other.yaml", text)
    assert (port.after, port.findings) == (text, [])


@pytest.mark.parametrize("cell", ["x = <your id>", "y = 1\nimport determined.<x>"])
def test_placeholders_in_notebooks_stay(cell: str, tmp_path: Path) -> None:
    port = port_text(tmp_path, "a.ipynb", notebook("import determined", cell, "%%time\nfrom determined import core"))
    assert port.after == notebook("import det_lightning", cell, "%%time\nfrom det_lightning import core")
    (found,) = port.findings
    where = f"cell 3, line {cell.count(chr(10)) + 1}"
    assert (found.reason, found.severity) == (f"{where}: not ported, because it is not Python 3", Severity.problem)
    again = port_text(tmp_path, "a.ipynb", port.after)
    assert (again.changed, again.findings) == (False, port.findings)
    assert port_text(tmp_path, "a.ipynb", notebook(cell.replace("determined", "x"), "import torch")).findings == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("run.sh", "ls\npython3 -c 'import determined; print(1)'\n", "2: Python in a command: import determined"),
        ("run.sh", "python <<E\nfrom determined import core\nE\n", "2: Python in a command: from determined import"),
        ("ci.yml", 'run: "python -c \\"import determined.core\\""\n', "1: Python in a command: import determined.core"),
        ("run.sh", "# python -c 'import determined'\n", None),
        ("run.sh", "echo from determined-ai\n", None),
    ],
)  # fmt: skip
def test_python_in_commands_is_named(name: str, text: str, found: str | None, tmp_path: Path) -> None:
    port = port_text(tmp_path, name, text)
    assert not port.changed
    assert [f"{one.line}: {one.reason}" for one in port.findings] == ([found] if found else [])


def test_mounts_leave_nothing_to_do(tmp_path: Path) -> None:
    config = f"name: x\nentrypoint: m:T\n{SEARCHER}bind_mounts:\n- {{host_path: /a, container_path: /not-here}}\n"
    (found,) = port_text(tmp_path, "const.yaml", config).findings
    assert (found.line, found.severity) == (5, Severity.note)
