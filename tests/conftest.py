"""What holds for every test: one thread, directories of its own, and an environment left as it was found."""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import typer.testing

from tests.warm_python import WarmPython, start_warm_python

hypothesis.settings.register_profile("det_lightning", deadline=None, max_examples=50, derandomize=True, database=None)
hypothesis.settings.load_profile("det_lightning")

# gcsfs would ask what kind of bucket it has by gRPC, which the server of the tests does not speak. It reads this only
# once, when it is imported, which any test may cause, so a fixture of the tests of storages would be too late.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# Making all commands anew takes longer than most of them run.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

# Shells let what they start in the background ignore Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set by pytest while a test runs, by torch and OpenMP when parts of them are first used, and by Lightning on a GPU.
_OF_OTHERS = ("PYTEST_", "PYTORCH_", "TORCH", "TRITON_", "KMP_", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING")

_GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those of ``tests/gpu``: the others know the numbers of a CPU."""
    paths = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    if not all(path.resolve().is_relative_to(_GPU_TESTS) for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a row by its values, where pytest would only count: by JSON or, for other values, by the keys of a dict."""
    if not isinstance(val, dict | list | tuple):
        return None
    try:
        return textwrap.shorten(json.dumps(val), 60, placeholder="...")
    except TypeError:
        return " and ".join(map(str, val)) if isinstance(val, dict) else None


@pytest.fixture(autouse=True)
def real_determined(request: pytest.FixtureRequest) -> None:
    """Skip what is marked ``determined`` where the real one is not installed."""
    if request.node.get_closest_marker("determined") and importlib.util.find_spec("determined") is None:
        pytest.skip("the real determined is not installed; run tox -e conformance")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only wait for each other on small models; processes that tests start use one as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def warm_python() -> WarmPython:
    """A Python whose processes begin with Lightning imported."""
    return start_warm_python()


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Options with which s3fs reaches an S3 server of the tests."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server", reason="no S3 server to test with; install moto[server]")
    from tests.checkpoint.storage.backends import s3_server

    with s3_server() as options:
        yield options


@pytest.fixture
def warm_spawn(warm_python: WarmPython) -> Iterator[None]:
    """Let the processes that multiprocessing spawns begin with Lightning imported."""
    multiprocessing.set_executable(warm_python.executable)
    yield
    multiprocessing.set_executable(sys.executable)


@pytest.fixture(autouse=True)
def own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in an empty directory, and with another one for what goes to the user's data directory.

    Both are apart from ``tmp_path``, so that a test can say exactly what is in there.
    """
    # Not mktemp() of the factory, which looks at all directories that there are.
    folders = [tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()) for _ in range(2)]
    # Not the fixture monkeypatch: what a test does with that has to be undone before the environment is looked at.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", folders[0])
        patch.chdir(folders[1])
        yield


@pytest.fixture(autouse=True)
def unchanged_environment(own_directories: None) -> Iterator[None]:
    """Fail a test that leaves environment variables set, changed or deleted."""
    before = _environment()
    yield
    after = _environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    os.environ.update({name: before[name] for name in changed if name in before})
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert not changed, f"The test changed the environment variables {', '.join(changed)}; use monkeypatch.setenv()."


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
