"""Whole projects: what ``port`` says of each entry point, and that it is so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from det_lightning.porting import Finding, Outcome, ProjectPort, Severity, port_project
from det_lightning.porting.smoke_run import try_project
from tests.experiments.running import run

PROJECTS = Path(__file__).parent / "projects"
DEEPSPEED = "(determined.pytorch.deepspeed.DeepSpeedTrial: DeepSpeedTrial is not covered)"


def given(name: str) -> ProjectPort:
    """Copy a project here and port it."""
    shutil.copytree(PROJECTS / name, ".", dirs_exist_ok=True)
    return ported()


def ported() -> ProjectPort:
    """Port what is here; once more changes nothing."""
    found = port_project([Path()])
    for port in found.files:
        if port.changed:
            port.write()
    again = port_project([Path()])
    assert not any(port.changed for port in again.files)
    assert sentences(again) == sentences(found)
    return found


def sentences(project: ProjectPort) -> dict[str, str]:
    return {str(entry.port.path): entry.sentence for entry in project.entry_points}


def findings_of(project: ProjectPort, path: str) -> list[Finding]:
    return [found for port in project.files if str(port.path) == path for found in port.findings]


def made(**files: str) -> ProjectPort:
    """Write files, with two underscores for a slash and one for the last dot, and port them."""
    for name, text in files.items():
        stem, _, suffix = name.replace("__", "/").rpartition("_")
        path = Path(f"{stem}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ported()


def test_entry_points_have_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_lightning.porting.entry_points.count_gpus", lambda: 2)
    configurations = [f"{name}.yaml" for name in ("adaptive", "const", "distributed", "harness")]
    runs = {name: f"should run with `det-lightning run {name} --hook skip`" for name in configurations}
    change = "submit.sh:3 (det e create: it talks to a Determined master)"
    assert sentences(given("classic")) == {
        **{name: f"{run}; 1 finding to look at" for name, run in runs.items()},
        "submit.sh": f"should run with `sh submit.sh` once this is changed: {change}",
    }
    hook = Path("startup-hook.sh")
    hook.write_text(f"{hook.read_text()}# det-lightning: ok\n")
    assert sentences(ported())["const.yaml"] == "should run with `det-lightning run const.yaml`"


def test_deepspeed_stays_and_the_rest_moves() -> None:
    project = given("deepspeed")
    assert sentences(project) == {
        "plain.yaml": "should run with `det-lightning run plain.yaml`",
        "zero.yaml": f"still needs Determined because of model_def.py:2 {DEEPSPEED}",
        "Makefile": f"still needs Determined because of model_def.py:2 {DEEPSPEED}",
    }
    originals = PROJECTS.joinpath("deepspeed").iterdir()
    unchanged = {path.name for path in originals if path.read_bytes() == Path(path.name).read_bytes()}
    assert unchanged == {"ds_config.json", "model_def.py", "zero.yaml"}
    (note,) = [found.reason for found in findings_of(project, "model_def.py") if found.severity is Severity.note]
    assert note == "left unchanged as a whole, because of line 2 (determined.pytorch.deepspeed.DeepSpeedTrial)"


def test_notebooks_for_the_master_stay() -> None:
    assert sentences(given("demo")) == {
        "determined_files/const.yaml": "should run with "
        "`det-lightning run determined_files/const.yaml determined_files`",
        "sweep.py": "should run with `python sweep.py` once this is changed: sweep.py:11 (det experiment create: "
        "it talks to a Determined master), sweep.py:19 (det e create: it talks to a Determined master)",
        "walkthrough.ipynb": "still needs Determined because of walkthrough.ipynb:27 (determined.experimental.client: "
        "it talks to a Determined master)",
    }
    cells = ["".join(cell["source"]) for cell in json.loads(Path("walkthrough.ipynb").read_text())["cells"]]
    assert "!det e create determined_files/const.yaml determined_files/" in cells[1]
    assert cells[2].startswith("from determined.experimental import client\n")


CONFIG = "entrypoint: {}\nsearcher: {{name: single, metric: loss, max_length: {{batches: 2}}}}\n"
OF_MODEL = CONFIG.format("model:T")
TRIAL = "from determined.pytorch import PyTorchTrial\nclass T(PyTorchTrial): pass\n"
SDK = "from determined.experimental import client\nclient.login()\n"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (CONFIG.format("other:T"), "const.yaml (there is no module other in the directories that were given)"),
        ("searcher: {name: single, metric: a}\nhyperparameters: {}\n", "const.yaml (it has no entrypoint)"),
    ],
)
def test_refused_configurations_get_advice(config: str, sentence: str) -> None:
    project = made(const_yaml=config, model_py=TRIAL)
    (entry,) = project.entry_points
    assert entry.outcome is Outcome.waits
    assert entry.sentence.startswith(f"should run with `det-lightning run const.yaml` once this is changed: {sentence}")


ENTRYPOINTS = [
    "pkg.model:T",
    "python3 -m determined.launch.torch_distributed --trial pkg.model:T",
    "python3 -m determined.launch.torch_distributed -- python3 pkg/model.py --x 1",
    "python3 -m determined.launch.horovod --fusion-threshold 1 pkg/model.py",
    "python -m determined.exec.harness pkg.model:T",
    "[python3, -m, pkg.model]",
    "bash scripts/go.sh",
]


@pytest.mark.parametrize(
    ("entrypoint", "folder"), [*((one, "") for one in ENTRYPOINTS), *((one, "configs__") for one in ENTRYPOINTS[::3])]
)
def test_code_is_found_for_any_entrypoint(entrypoint: str, folder: str) -> None:
    files = {
        f"{folder}const_yaml": CONFIG.format(entrypoint),
        "pkg____init___py": "",
        "pkg__model_py": f"from . import sdk\n{TRIAL}",
        "pkg__sdk_py": SDK,
        "scripts__go_sh": "python3 pkg/model.py\n",
    }
    project = made(**files)
    entry = next(entry for entry in project.entry_points if entry.port.path.suffix == ".yaml")
    needs = "pkg/sdk.py:1 (determined.experimental.client: it talks to a Determined master)"
    assert entry.sentence == f"still needs Determined because of {needs}"
    (found,) = findings_of(project, "pkg/model.py")
    assert found.reason == f"it imports {needs}"
    assert Path("pkg/sdk.py").read_text() == SDK
    assert "det_lightning" in Path("pkg/model.py").read_text()


@pytest.mark.parametrize(
    ("entrypoint", "directory"),
    [
        ("pkg.model:T", " src"),
        ("cd src && python3 pkg/model.py", ""),
        ("[bash, -c, 'cd ./src/; python3 -m pkg.model']", ""),
        ("cd data && sh get.sh; cd - && python3 src/pkg/model.py", ""),
        ("cd /data && python3 src/pkg/model.py", ""),
    ],
)
def test_code_is_found_in_src(entrypoint: str, directory: str) -> None:
    code = {"src__pkg__model_py": TRIAL, "src__pkg__sdk_py": SDK}
    run = "from determined import core\nfrom pkg import sdk\ncore.init()\n"
    found = sentences(made(configs__const_yaml=CONFIG.format(entrypoint), scripts__run_py=run, **code))
    assert found["configs/const.yaml"] == f"should run with `det-lightning run configs/const.yaml{directory}`"
    assert found["scripts/run.py"].startswith("still needs Determined because of src/pkg/sdk.py:1")


MMDET = "model_hub.mmdetection:MMDetTrial"


@pytest.mark.parametrize("entrypoint", [MMDET, f"python3 -m determined.launch.torch_distributed --trial {MMDET}"])
def test_uncovered_packages_stay(entrypoint: str) -> None:
    (entry,) = made(const_yaml=CONFIG.format(entrypoint)).entry_points
    needs = "const.yaml:1 (model_hub.mmdetection: model-hub's trials of MMDetection are not covered)"
    assert entry.sentence == f"still needs Determined because of {needs}"
    assert entrypoint in Path("const.yaml").read_text()


def test_self_submitting_trials_move() -> None:
    script = "from determined.experimental import client\n" + TRIAL + "if __name__ == '__main__':\n    client.login()\n"
    project = made(const_yaml=OF_MODEL, model_py=script)
    entries = {str(entry.port.path): entry for entry in project.entry_points}
    assert entries["const.yaml"].outcome is Outcome.moves
    assert Path("model.py").read_text().startswith("from det_lightning.pytorch import PyTorchTrial\n")


def test_other_files_are_no_entry_points() -> None:
    assert made(a_py="print(1)\n", b_sh="ls\n", c_yaml="searcher: google\nx: 1\n", d_py=TRIAL).entry_points == []
    project = made(api_pyi="from determined.experimental import client\ndef get() -> client.Determined: ...\n")
    assert [finding.severity for port in project.files for finding in port.findings] == [Severity.problem]
    assert project.entry_points == []


@pytest.mark.parametrize(
    ("code", "is_removed"),
    [
        ("with open('a') as f: pass\n", True),
        ("if __name__ == '__main__':\n    main()\n", True),
        (TRIAL, True),
        ("X = 1\n", False),  # perhaps taken by other files
    ],
)
def test_unused_sdk_imports_go(code: str, is_removed: bool) -> None:
    imports = ["from determined.experimental import client", "import determined.experimental.client as client"]
    made(model_py=f"{imports[0]}\n\n{code}", other_py=f"{imports[1]}\n\n{code}")
    for name in ("model.py", "other.py"):
        assert ("client" not in Path(name).read_text()) == is_removed


@pytest.mark.slow
def test_a_try_leaves_the_project_alone() -> None:
    program = "import determined as det\nwith det.core.init(): {}\n"
    made(
        good_yaml=CONFIG.format("python3 good.py").replace("batches: 2", "epochs: 100000"),
        bad_yaml=CONFIG.format("python3 bad.py"),
        good_py=program.format("open('written', 'w').close()"),
        bad_py=program.format("{}['lr']"),
        alone_py=program.format("open('written', 'w').close()"),
        scripts__deep_py=program.format("open('good.yaml').close()"),
        start_sh="det-lightning run good.yaml\n",
    )
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert sentences(try_project(port_project([Path()]), [Path()])) == {
        "alone.py": "ran with `python alone.py`",
        "bad.yaml": "failed with `det-lightning run bad.yaml`: KeyError: 'lr'",
        "good.yaml": "ran with `det-lightning run good.yaml`",
        "scripts/deep.py": "ran with `python scripts/deep.py`",
        "start.sh": "should run with `sh start.sh`",
    }
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_docker_in_a_name_means_nothing() -> None:
    launch = "python -m determined.launch.torch_distributed -- python train.py\n"
    project = made(**{"docker-run_sh": launch, "scripts__docker_mk": launch, "Dockerfile_gpu": f"RUN {launch}"})
    assert sentences(project) == {
        "docker-run.sh": "should run with `sh docker-run.sh`",
        "scripts/docker.mk": "should run with det_lightning",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("classic", "harness.yaml"),
        ("deepspeed", "plain.yaml"),
        ("demo", "determined_files/const.yaml"),
    ],
)
def test_runnable_configurations_run(name: str, config: str) -> None:
    (entry,) = [entry for entry in given(name).entry_points if str(entry.port.path) == config]
    assert not any(found.severity is Severity.problem for port in entry.files for found in port.findings)
    assert entry.outcome is Outcome.moves
    program, *arguments = entry.command.split()
    assert program == "det-lightning"
    run(*arguments, "--cpu", is_warm=True)
    (experiment,) = json.loads(run("experiment", "ls", "--json").stdout)
    assert experiment["state"] == "COMPLETED"


@pytest.mark.parametrize(
    ("model", "is_there"),
    [
        (TRIAL, True),
        (TRIAL.replace("class T(", "class Other("), False),
        ("from base import T\nfrom determined.pytorch import PyTorchTrial\n", True),
        ("import determined\ntry:\n    import a\nexcept ImportError:\n    def T(): pass\n", True),
    ],
)
def test_missing_classes_are_named(model: str, is_there: bool) -> None:
    (entry,) = made(const_yaml=OF_MODEL, model_py=model).entry_points
    said = "once this is changed: const.yaml (there is no class T in model.py)"
    assert (entry.outcome is Outcome.moves, said in entry.sentence) == (is_there, not is_there)


def test_deepspeeds_scripts_wait() -> None:
    script = SCRIPT.replace("init()", "init(distributed=core.DistributedContext.from_deepspeed())")
    project = made(const_yaml=CONFIG.format("python3 -m determined.launch.deepspeed python3 train.py"), train_py=script)
    (entry,) = project.entry_points
    assert entry.outcome is Outcome.waits
    assert entry.sentence.startswith("should run with `det-lightning run const.yaml` once this is changed: const.yaml:")
    assert "determined.launch.deepspeed: DeepSpeed's launcher is not covered" in entry.sentence
    assert "train.py:3 (from_deepspeed() needs Determined's launcher of DeepSpeed)" in entry.sentence
    assert "from det_lightning import core" in Path("train.py").read_text()
    replaced = {"const.yaml": "det_lightning.launch.torch_distributed", "train.py": "from_torch_distributed"}
    for name, used in replaced.items():
        (found,) = [found for port in project.files if str(port.path) == name for found in port.findings]
        assert used in found.advice
        Path(name).write_text(re.sub(r"determined\.launch\.deepspeed|from_deepspeed", used, Path(name).read_text()))
    assert ported().entry_points[0].outcome is Outcome.moves


def test_unexecutable_scripts_are_named() -> None:
    (entry,) = made(const_yaml=CONFIG.format("./train.py --x 1"), train_py=SCRIPT).entry_points
    assert entry.sentence.endswith("once this is changed: train.py (it is not executable)")
    Path("train.py").chmod(0o755)
    assert ported().entry_points[0].outcome is Outcome.moves


SCRIPT = "#!/usr/bin/env python3\nfrom determined import core\nwith core.init() as context: pass\n"


def reasons(project: ProjectPort, path: str) -> list[str]:
    return [found.reason for found in findings_of(project, path)]


def test_staying_files_have_no_changes() -> None:
    model = f"from determined import keras\nfrom determined.experimental import client\nkeras.x()\n{TRIAL}x.cuda()\n"
    project = made(const_yaml=OF_MODEL, model_py=model, data_py="import determined, model\n", other_py=TRIAL)
    assert "still needs Determined" in sentences(project)["const.yaml"]
    assert Path("model.py").read_text() == model
    assert [found.line for found in findings_of(project, "model.py")] == [0, 1]
    assert [found.severity for found in findings_of(project, "data.py")] == [Severity.problem]


def test_started_scripts_have_cluster_info() -> None:
    read = "from determined import get_cluster_info, pytorch\ninfo = get_cluster_info()\nprint(info.trial.hparams)\n"
    script = f"{read}with pytorch.init() as c: pytorch.Trainer(T(c), c).fit()\n"
    alone = made(train_py=script)
    assert sentences(alone) == {"train.py": "should run with `det-lightning run CONFIG`; 2 findings to look at"}
    assert len(reasons(alone, "train.py")) == 2
    assert reasons(made(const_yaml=CONFIG.format("python3 train.py")), "train.py") == []
    Path("const.yaml").unlink()
    plain = made(train_py="import determined as det\ninfo = det.get_cluster_info()\nprint(info)\n")
    assert sentences(plain) == {"train.py": "should run with `python train.py`"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [(SCRIPT, "needs a GPU: model.cuda()"), (TRIAL, "a tensor or model is moved to a GPU by hand (.cuda())")],
)
def test_context_advice_is_for_trials(script: str, expected: str) -> None:
    project = made(train_py=f"import helper\n{script}", helper_py="def f(model): return model.cuda()\n")
    assert reasons(project, "helper.py") == [expected]


@pytest.mark.parametrize(
    ("code", "needs"),
    [
        ("x = torch.zeros(1).cuda()", True),
        ("device = torch.device('cuda')", True),
        ("dist.init_process_group(backend='nccl')", True),
        ("dist.init_process_group('gloo')", False),
        ("transformers.TrainingArguments('out', fp16=True)", True),
        ("transformers.TrainingArguments('out', fp16=False)", False),
        ("pl.Trainer(accelerator='gpu')", True),
        ("helper.move(x)", False),
        ("helper.force(x)", True),
        ("if torch.cuda.is_available(): torch.cuda.set_device(0)", False),
        ("if args.gpu is not None: torch.cuda.set_device(args.gpu)", False),
        ("device = torch.device('cuda' if args.cuda else 'cpu')", False),
        ("try: x.cuda()\n    except AssertionError: pass", False),
        ("device = 'cuda'\n    if not torch.cuda.is_available(): device = 'cpu'", False),
        ("def to_gpu(x): return x.cuda()\n    if torch.cuda.is_available(): to_gpu(x)", False),
        ("def to_gpu(x):\n        if torch.cuda.device_count() == 0: return x\n        return x.cuda()", False),
    ],
)
@pytest.mark.parametrize("has_gpu", [True, False])
def test_code_for_gpus_is_named(code: str, needs: bool, has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_lightning.porting.entry_points.count_gpus", lambda: int(has_gpu))
    move = "def move(x): return x.cuda() if torch.cuda.is_available() else x\n"
    helpers = {"helper_py": move, "forced_py": "def force(x):\n    return x.cuda()\n"}
    imports = "import forced\n" if "force" in code else "import helper\n"
    script = f"{imports}from determined import core\nwith core.init() as context:\n    {code}\n"
    project = made(const_yaml=CONFIG.format("python3 train.py"), train_py=script, **helpers)
    file, line = ("forced.py", 2) if "force" in code else ("train.py", 4)
    found = [one for one in findings_of(project, file) if one.reason.startswith("needs a GPU: ")]
    assert [(one.line, one.severity) for one in found] == [(line, Severity.check)] * needs
    (entry,) = project.entry_points
    is_lacking = needs and not has_gpu
    assert entry.outcome is (Outcome.waits if is_lacking else Outcome.moves)
    assert entry.sentence.startswith("needs a GPU, which this machine lacks" if is_lacking else "should run with")
    trial = made(const_yaml=OF_MODEL, model_py=TRIAL + "x.cuda()\n").entry_points[0]
    assert trial.outcome is (Outcome.moves if has_gpu else Outcome.waits)


@pytest.mark.parametrize(
    ("gpus", "slots", "options"), [(0, 8, " --slots 1"), (2, 8, " --slots 2"), (8, 8, ""), (0, 1, "")]
)
def test_slots_are_there(gpus: int, slots: int, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("det_lightning.porting.entry_points.count_gpus", lambda: gpus)
    config = f"{OF_MODEL}resources: {{slots_per_trial: {slots}}}\n"
    assert sentences(made(const_yaml=config, model_py=TRIAL)) == {
        "const.yaml": f"should run with `det-lightning run const.yaml{options}`"
    }


READS = """from determined.pytorch import PyTorchTrial
class Base(PyTorchTrial):
    def __init__(self, context):
        self.base = context.get_hparam("of_base")
        self.model = context.wrap_model(None)
    def other(self): return self.context.get_hparam("unread")
class T(Base):
    def __init__(self, context):
        super().__init__(context)
        {}
class Other(PyTorchTrial):
    def __init__(self, context): context.get_hparam("of_other")
"""
NO_FLAG = "no flag in hyperparameters: model.py:10 reads it"


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("context.get_hparam('flag')", NO_FLAG),
        ("context.get_hparams()['flag']", NO_FLAG),
        ("self.hparams = context.get_hparams(); self.hparams['flag']", NO_FLAG),
        ("context.get_per_slot_batch_size()", "no global_batch_size in hyperparameters: model.py:10 reads it"),
        ("context.get_hparam('lr')", ""),
        ("context.get_hparams().get('flag')", ""),
        ("x = context.get_hparam('flag') if lr else 0", ""),
        ("context.get_hparam('flag')  # det-lightning: ok", ""),
        ("h = context.get_hparams(); h['flag'] = 1; h['flag']", ""),
        ("h = context.get_hparams(); assert 'flag' in h; h['flag']", ""),
        ("if context.get_hparam('lr'): context.get_hparam('flag')", ""),
        ("try: context.get_hparam('flag')\n        except KeyError: pass", ""),
        ("if lr:\n            return\n        context.get_hparam('flag')", ""),
        ("def schedule(): return context.get_hparam('flag')", ""),
        ("pass\n    def schedule(self): return self.context.get_hparam('flag')", ""),
        ("pass\n    def build_callbacks(self): return self.context.get_hparam('flag')", NO_FLAG.replace("10", "11")),
        ("context.get_hparam('flag')\n        if lr: return", NO_FLAG),
    ],
)
@pytest.mark.parametrize("given", ["lr: 1", "lr: {type: double, minval: 0, maxval: 1}"])
def test_missing_hyperparameters_are_named(line: str, missing: str, given: str) -> None:
    search = "searcher: {name: single, metric: x, max_length: {batches: 2}}"
    config = f"entrypoint: model:T\nhyperparameters:\n  {given}\n{search}\n"
    project = made(const_yaml=config, model_py=READS.format(line))
    expected = [*([missing] if missing else []), "no of_base in hyperparameters: model.py:4 reads it"]
    found = findings_of(project, "const.yaml")
    assert sorted(one.reason for one in found) == sorted(expected)
    assert {(one.line, one.severity) for one in found if "hyperparameters" in one.reason} == {(2, Severity.problem)}
    assert project.entry_points[0].outcome is Outcome.waits


@pytest.mark.parametrize(
    ("code", "base"),
    [
        ("import base\nclass T(base.T): pass\n", "T(PyTorchTrial)"),
        ("from base import B\nclass T(B): pass\n", "B(PyTorchTrial)"),
    ],
)
def test_bases_of_any_name_are_read(code: str, base: str) -> None:
    init = "def __init__(self, context): context.get_hparam('flag')"
    config = OF_MODEL.replace("searcher", "hyperparameters: {lr: 1}\nsearcher", 1)
    project = made(
        const_yaml=config,
        model_py=f"from determined.pytorch import PyTorchTrial\n{code}",
        base_py=f"from determined.pytorch import PyTorchTrial\nclass {base}:\n    {init}\n",
    )
    assert reasons(project, "const.yaml") == ["no flag in hyperparameters: base.py:3 reads it"]


@pytest.mark.parametrize(("arguments", "missing"), [("", True), ("hparams={'flag': 1}", False)])
def test_scripts_may_give_hyperparameters(arguments: str, missing: bool) -> None:
    script = (
        "import determined as det\ninfo = det.get_cluster_info()\ninfo.trial.hparams['lr']\n"
        f"with det.pytorch.init({arguments}) as context:\n    context.get_hparam('flag')\n"
    )
    config = CONFIG.format("python3 train.py").replace("searcher", "hyperparameters: {lr: 1}\nsearcher", 1)
    found = findings_of(made(const_yaml=config, train_py=script), "const.yaml")
    assert [one.reason for one in found] == ["no flag in hyperparameters: train.py:5 reads it"] * missing


REPORTS = "import determined as det\nwith det.core.init() as core_context: print(core_context)\n"
SUBMITS = f"""{REPORTS}
if __name__ == "__main__":
    from determined.experimental import client
    client.login()
"""


@pytest.mark.parametrize("entrypoint", ["python3 train.py", "python3 -m train", "bash run.sh"])
def test_master_scripts_keep_their_starters(entrypoint: str) -> None:
    project = made(const_yaml=CONFIG.format(entrypoint), train_py=SUBMITS, run_sh="python train.py\n")
    needs = "train.py:5 (determined.experimental.client: it talks to a Determined master)"
    assert sentences(project) == {"const.yaml": f"still needs Determined because of {needs}"}
    assert Path("train.py").read_text() == SUBMITS


def test_master_scripts_release_importers() -> None:
    project = made(const_yaml=CONFIG.format("python3 run.py"), train_py=SUBMITS, run_py="import train\n")
    assert sentences(project) == {"const.yaml": "should run with `det-lightning run const.yaml`"}


@pytest.mark.parametrize(
    ("condition", "stays"), [("TYPE_CHECKING", False), ("not typing.TYPE_CHECKING", True), ("X or TYPE_CHECKING", True)]
)
def test_type_imports_reach_nothing(condition: str, stays: bool) -> None:
    train = f"from determined import core\nif {condition}:\n    import sdk\ncore.init()\n"
    project = made(train_py=train, sdk_py=SDK)
    assert sentences(project)["train.py"].startswith("still needs Determined" if stays else "should run with")


def test_hooks_keep_configurations() -> None:
    Path("startup-hook.sh").write_text("det master logs\n")
    project = made(const_yaml=OF_MODEL, model_py=TRIAL)
    needs = "startup-hook.sh:1 (det master logs: it needs a Determined master)"
    assert sentences(project) == {"const.yaml": f"still needs Determined because of {needs}"}
    assert Path("model.py").read_text() != TRIAL


def test_tools_of_determined_go_last() -> None:
    files = {"deploy__requirements_txt": "determined==0.19\ndetermined-cli\n", "deploy__sdk_py": SDK}
    project = made(**files, const_yaml=OF_MODEL, model_py=TRIAL)
    assert Path("deploy/requirements.txt").read_text() == "det-lightning~=0.1\ndetermined-cli\n"
    assert findings_of(project, "deploy/requirements.txt") == []
    # Once nothing needs Determined, its tools are not needed, either.
    Path("deploy/sdk.py").unlink()
    (found,) = [port for port in made().files if port.path.name == "requirements.txt"]
    assert [finding.reason for finding in found.findings] == ["determined-cli: it talks to a Determined master"]


def test_imports_read_as_attributes_stay() -> None:
    use = "import api as a\nprint(a.client.list_experiments())\n"
    project = made(api_py="from determined.experimental import client\n", use_py=use)
    assert reasons(project, "api.py") == ["determined.experimental.client: it talks to a Determined master"]
