"""Answering to the name ``determined``. Each test is a process: what is imported stays imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from det_lightning import compat


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return run("-c", f"import sys\nfrom det_lightning import compat\n{code}")


def printed(code: str) -> list[str]:
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_determined_modules_are_ours() -> None:
    code = """
print('determined' in sys.modules)
compat.install()
compat.install()
import determined as det
import det_lightning
from determined import __version__, core, errors
from determined.checkpoint import storage
import determined.errors
import det_lightning.checkpoint.storage
print(det.InvalidHP is det_lightning.InvalidHP, core is det_lightning.core, errors is det_lightning.errors)
print(storage is det_lightning.checkpoint.storage, det.errors is errors)
print(det.__name__, det.__spec__.name, errors.__spec__.name, det.InvalidHP is errors.InvalidHP)
print(sum(type(finder).__name__ == "_AliasFinder" for finder in sys.meta_path))
print(det.__version__, __version__, det_lightning.__version__ == __version__)
print(set(dir(det_lightning)) <= set(dir(det)), det.__doc__ == det_lightning.__doc__)
for name in ("determined.keras", "determined.core.profiler", "determined.no.such"):
    try:
        __import__(name)
    except ModuleNotFoundError as e:  # what is not covered is named
        print(name in str(e) or "determined.no" in str(e), e.name.startswith("determined."))
"""
    assert printed(code) == [
        "False",
        "True True True",
        "True True",
        "det_lightning det_lightning det_lightning.errors True",
        "1",
        "0.38.1 0.38.1 False",
        "True True",
        *["True True"] * 3,
    ]


@pytest.mark.slow
def test_modules_run_under_determineds_names() -> None:
    printed("""
import runpy
compat.install()
sys.argv = ["", "true"]
runpy._run_module_as_main("determined.launch.torch_distributed")
""")


INTERNAL = {
    "_callback": "PyTorchCallback",
    "_data": "DataLoader TorchData adapt_batch_sampler data_length to_device",
    "_experimental": "PyTorchExperimentalContext",
    "_load": "CheckpointLoadContext load_trial_from_checkpoint_path",
    "_lr_scheduler": "LRScheduler",
    "_pytorch_context": "PyTorchTrialContext",
    "_pytorch_trial": "PyTorchTrial",
    "_reducer": "MetricReducer Reducer",
    "_trainer": "Trainer init",
    "_trainer_utils": "Batch Epoch TrainUnit",
}


@pytest.mark.slow
def test_internal_modules_and_model_hub_exist() -> None:
    code = f"""
compat.install()
import importlib
from determined import pytorch
for name, members in {INTERNAL}.items():
    module = importlib.import_module("determined.pytorch." + name)
    print(module.__name__, all(getattr(module, member) is getattr(pytorch, member) for member in members.split()))
from model_hub import utils
import model_hub.utils
import det_lightning.model_hub.utils
print(utils is det_lightning.model_hub.utils, model_hub.utils is utils)
try:
    import model_hub.mmdetection.utils
except ImportError as e:
    print("model_hub.mmdetection is not covered" in str(e))
"""
    assert printed(code) == [*(f"det_lightning.pytorch.{name} True" for name in INTERNAL), "True True", "True"]


@pytest.mark.slow
def test_model_hub_of_a_project_wins() -> None:
    Path("model_hub").mkdir()
    Path("model_hub/__init__.py").write_text("")
    Path("model_hub/resnet.py").write_text("LAYERS = 18")
    code = "compat.install()\nimport model_hub.resnet as r\nprint(r.LAYERS, r.__name__)"
    assert printed(code) == ["18 model_hub.resnet"]


@pytest.mark.slow
@pytest.mark.determined
def test_imported_determined_is_not_replaced() -> None:
    done = run_code("import determined\ncompat.install()")
    assert done.returncode == 1
    assert "RuntimeError: The real determined is imported already, from " in done.stderr
    assert "Call det_lightning.compat.install() before the first import of determined" in done.stderr


def test_script_runs_unmodified() -> None:
    Path("project").mkdir()
    Path("project/neighbour.py").write_text("HERE = 'beside the script'\n")
    Path("project/train.py").write_text(
        "import sys, determined, neighbour\n"
        "if __name__ == '__main__':\n"
        "    print(determined.__name__, sys.argv, neighbour.HERE)\n    raise SystemExit(7)\n"
    )
    done = run("-m", "det_lightning", "project/train.py", "--lr", "0.1")
    assert done.stdout == "det_lightning ['project/train.py', '--lr', '0.1'] beside the script\n", done.stderr
    assert done.returncode == 7


def test_module_runs_unmodified() -> None:
    Path("package").mkdir()
    Path("package/train.py").write_text(
        "import sys, determined\nfrom . import neighbour\n"
        "if __name__ == '__main__':\n"
        "    print(determined.__name__, sys.argv[1:], __package__, neighbour.HERE)\n"
    )
    Path("package/neighbour.py").write_text("HERE = 'beside the module'\n")
    Path("package/__init__.py").touch()
    done = run("-m", "det_lightning", "-m", "package.train", "--lr", "0.1")
    assert done.stdout == "det_lightning ['--lr', '0.1'] package beside the module\n", done.stderr


@pytest.mark.slow
def test_determineds_launcher_runs_scripts() -> None:
    Path("train.py").write_text("import determined\nprint(determined.__name__)\n")
    launcher = ["-m", "determined.launch.torch_distributed", "--nproc-per-node", "2", "--", "python", "train.py"]
    done = run("-m", "det_lightning", *launcher)
    assert done.stdout == "det_lightning\n" * 2, done.stderr


WORKERS = """
import multiprocessing, sys
import determined

def name_of_determined(_):
    import determined
    return determined.__name__, determined.core.__name__

class Names:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return "/".join(name_of_determined(index))

if __name__ == "__main__":
    for method in sys.argv[1:]:
        if method in multiprocessing.get_all_start_methods():
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(*pool.map(name_of_determined, [0])[0])
        else:
            from determined.pytorch import DataLoader
            loader = DataLoader(Names(), num_workers=1, multiprocessing_context=method.removeprefix("loader-"))
            print(*[names for names, in loader.get_data_loader()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "methods"),
    [("command", ["spawn", "forkserver", "loader-spawn"]), ("install", ["spawn", "loader-forkserver"])],
)
def test_worker_processes_have_the_alias_too(start: str, methods: list[str]) -> None:
    Path("train.py").write_text(WORKERS)
    if start == "install":
        # Unlike the script, the modules that workers import call nothing.
        Path("start.py").write_text(
            "import runpy\n"
            "if __name__ == '__main__':\n"
            "    from det_lightning import compat\n"
            "    compat.install()\n"
            "    runpy.run_path('train.py', run_name='__main__')\n"
        )
    done = run(*(["-m", "det_lightning", "train.py"] if start == "command" else ["start.py"]), *methods)
    outputs = {True: " ".join(["det_lightning/det_lightning.core"] * 2), False: "det_lightning det_lightning.core"}
    assert done.stdout.splitlines() == [outputs[method.startswith("loader")] for method in methods], done.stderr


def test_temporary_alias_restores_the_path() -> None:
    code = """
before = list(sys.path)
with compat.answering_determined():
    print(sys.path[:1] == before[:1], len(sys.path) - len(before))
print(sys.path == before)
sys.path.append(str(compat.ALIAS_DIRECTORY))
before = list(sys.path)
with compat.answering_determined():
    pass
print(sys.path == before)
"""
    assert printed(code) == ["True 1", "True", "True"]


def test_the_command_line_explains_itself() -> None:
    ends = {
        (): 2,
        ("--help",): 0,
        ("-m",): 2,
        ("missing.py",): "det_lightning: there is no script missing.py",
        ("-m", "missing"): "det_lightning: there is no module missing",
        ("-m", "missing.train"): "det_lightning: there is no module missing.train",
    }
    code = f"""
from det_lightning.__main__ import main
for arguments in {[*ends]}:
    sys.argv = ["det_lightning", *arguments]
    try:
        main()
    except SystemExit as end:
        print("ends with", end.code)
"""
    lines = printed(code)
    assert [line for line in lines if line.startswith("ends with ")] == [f"ends with {end}" for end in ends.values()]
    assert lines.count("usage: python -m det_lightning SCRIPT [ARGS...]") == 3
    assert "`" not in "".join(lines)


@pytest.mark.parametrize(("packages", "name"), [([], "det_lightning.model_hub"), (["own"], "model_hub")])
def test_alias_finds_model_hub(packages: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "model_hub").mkdir(parents=True)
    (tmp_path / "own" / "model_hub" / "__init__.py").write_text("")
    folders = [compat.ALIAS_DIRECTORY, Path(compat.__file__).parents[1], *(tmp_path / package for package in packages)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    done = run("-c", "import model_hub; print(model_hub.__name__)")
    assert done.stdout.strip() == name, done.stderr
