"""Answering to the name ``determined``. Each test is a process: what is imported stays imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def evaluate(code: str, expressions: Iterable[str]) -> dict[str, Any]:
    """Return the values of expressions after the code, in a process of their own."""
    done = printed(f"{code}\nimport json\nprint(json.dumps({{each: eval(each) for each in {[*expressions]}}}))")
    values: dict[str, Any] = json.loads(done[-1])
    return values


#: What is so once ``determined`` is det_lightning: by the promise, an expression that is true.
PROMISES = {
    "det_lightning alone takes no name": "not was_imported",
    "classes are det_lightning's": "det.InvalidHP is det_lightning.InvalidHP is errors.InvalidHP",
    "modules are det_lightning's": "core is det_lightning.core and errors is det_lightning.errors is det.errors",
    "deep modules are det_lightning's": "storage is det_lightning.checkpoint.storage",
    "modules keep their names": "(det.__name__, det.__spec__.name) == ('det_lightning',) * 2",
    "submodules keep their names": "errors.__spec__.name == 'det_lightning.errors'",
    "installing twice is like once": "sum(type(finder).__name__ == '_AliasFinder' for finder in sys.meta_path) == 1",
    "the version is Determined's": "det.__version__ == __version__ == '0.38.1' != det_lightning.__version__",
    "dir() has all names": "set(dir(det_lightning)) <= set(dir(det))",
    "help() shows the docstring": "det.__doc__ == det_lightning.__doc__",
}
MISSING = {"determined.keras": "keras", "determined.core.profiler": "core.profiler", "determined.no.such": "no"}


def test_alias_keeps_its_promises() -> None:
    code = """
was_imported = "determined" in sys.modules
compat.install()
compat.install()
import determined as det
import det_lightning
from determined import __version__, core, errors
from determined.checkpoint import storage
import determined.errors
import det_lightning.checkpoint.storage

def name_missing(module):
    try:
        __import__(module)
    except ModuleNotFoundError as e:
        return e.name if e.name in str(e) else str(e)
"""
    missing = {f"name_missing({module!r})": f"determined.{named}" for module, named in MISSING.items()}
    assert evaluate(code, [*PROMISES.values(), *missing]) == {**dict.fromkeys(PROMISES.values(), True), **missing}


@pytest.mark.slow
def test_modules_run_under_determineds_names() -> None:
    printed("""
import runpy
compat.install()
sys.argv = ["", "true"]
runpy._run_module_as_main("determined.launch.torch_distributed")
""")


INTERNAL = [
    "_callback.PyTorchCallback",
    *(f"_data.{name}" for name in ("DataLoader", "TorchData", "adapt_batch_sampler", "data_length", "to_device")),
    "_experimental.PyTorchExperimentalContext",
    *(f"_load.{name}" for name in ("CheckpointLoadContext", "load_trial_from_checkpoint_path")),
    "_lr_scheduler.LRScheduler",
    "_pytorch_context.PyTorchTrialContext",
    "_pytorch_trial.PyTorchTrial",
    *(f"_reducer.{name}" for name in ("MetricReducer", "Reducer")),
    *(f"_trainer.{name}" for name in ("Trainer", "init")),
    *(f"_trainer_utils.{name}" for name in ("Batch", "Epoch", "TrainUnit")),
]
MODEL_HUB = {
    "model_hub is det_lightning's": "model_hub.utils is det_lightning.model_hub.utils",
    "what is not covered is named": "is_refused('model_hub.mmdetection.utils')",
}


@pytest.mark.slow
def test_internal_names_are_the_public_ones() -> None:
    """And model_hub is det_lightning's."""
    code = """
compat.install()
import importlib
from determined import pytorch
import model_hub.utils
import det_lightning.model_hub.utils

def is_public(name):
    module, _, member = name.partition(".")
    return getattr(importlib.import_module("determined.pytorch." + module), member) is getattr(pytorch, member)

def is_refused(module):
    try:
        importlib.import_module(module)
    except ImportError as e:
        return "model_hub.mmdetection is not covered" in str(e)
"""
    expressions = [*(f"is_public({name!r})" for name in INTERNAL), *MODEL_HUB.values()]
    assert evaluate(code, expressions) == dict.fromkeys(expressions, True)


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


@pytest.mark.parametrize("is_there", [False, True], ids=["added", "there before"])
def test_temporary_alias_restores_the_path(is_there: bool) -> None:
    code = f"""
sys.path.extend([str(compat.ALIAS_DIRECTORY)] * {is_there})
before = list(sys.path)
with compat.answering_determined():
    inside = list(sys.path)
"""
    added = "len(inside) - len(before)"
    values = evaluate(code, ["before == sys.path", "inside[0] == before[0]", added])
    assert values == {"before == sys.path": True, "inside[0] == before[0]": True, added: int(not is_there)}


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["-m"], 2)], ids=repr)
def test_command_line_explains_itself(arguments: list[str], status: int) -> None:
    done = run("-m", "det_lightning", *arguments)
    assert done.returncode == status
    assert "usage: python -m det_lightning SCRIPT [ARGS...]" in done.stdout.splitlines()
    assert "`" not in done.stdout


@pytest.mark.parametrize("arguments", [["missing.py"], ["-m", "missing"], ["-m", "missing.train"]], ids=" ".join)
def test_command_line_names_what_is_missing(arguments: list[str]) -> None:
    kind = "module" if "-m" in arguments else "script"
    assert run("-m", "det_lightning", *arguments).stderr == f"det_lightning: there is no {kind} {arguments[-1]}\n"


@pytest.mark.parametrize(("packages", "name"), [([], "det_lightning.model_hub"), (["own"], "model_hub")])
def test_alias_finds_model_hub(packages: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "model_hub").mkdir(parents=True)
    (tmp_path / "own" / "model_hub" / "__init__.py").write_text("")
    folders = [compat.ALIAS_DIRECTORY, Path(compat.__file__).parents[1], *(tmp_path / package for package in packages)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    done = run("-c", "import model_hub; print(model_hub.__name__)")
    assert done.stdout.strip() == name, done.stderr
