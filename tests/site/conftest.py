"""What the commands of the documentation find."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from filelock import FileLock

from tests.launching import environment
from tests.site.projects import write_ported_project, write_project
from tests.warm_python import WarmPython


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that still uses Determined, with checkpoints; one for all processes that run tests."""
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = tmp_path_factory.getbasetemp() if is_alone else tmp_path_factory.getbasetemp().parent
    with FileLock(folder / "project.lock"):
        if not (folder / "project").exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("code"))
                write_project(folder / "unfinished")
            (folder / "unfinished").rename(folder / "project")
    return folder / "project"


@pytest.fixture(scope="session")
def ported_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that uses det_lightning, with a script that trains."""
    folder = tmp_path_factory.mktemp("ported") / "project"
    write_ported_project(folder)
    return folder


@pytest.fixture
def buckets(project: Path, s3_options: dict[str, Any]) -> Iterator[None]:
    """The buckets that pages name: one with checkpoints, and an empty one."""
    s3 = fsspec.filesystem("s3", **s3_options, skip_instance_cache=True)
    s3.mkdir("bucket")
    s3.put(str(project / "prefix"), "bucket/prefix", recursive=True)
    s3.mkdir("moons-checkpoints")
    yield
    for bucket in ("bucket", "moons-checkpoints"):
        s3.rm(bucket, recursive=True)


@pytest.fixture
def variables(warm_python: WarmPython, buckets: None, s3_options: dict[str, Any]) -> dict[str, str]:
    """The environment of commands: those of this Python first, S3 from the tests' server, one check of a trial."""
    programs = [str(warm_python.programs), str(Path(sys.executable).parent)]
    return environment(
        PATH=os.pathsep.join([*programs, os.environ["PATH"]]),
        AWS_ACCESS_KEY_ID=s3_options["key"],
        AWS_SECRET_ACCESS_KEY=s3_options["secret"],
        AWS_ENDPOINT_URL=s3_options["endpoint_url"],
        AWS_DEFAULT_REGION="us-east-1",
        PYTEST_ADDOPTS="-k trains -p no:cacheprovider",
    )
