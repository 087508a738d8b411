"""The trainings of tests/distributed/ranks.py, once for all tests that look at them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.checkpoint.storage.backends import new_bucket, s3_server
from tests.distributed.trained import launch
from tests.versions import SHARDS


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every scenario left behind: on one rank, two and three, and under Lightning's own launcher."""
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    with FileLock(f"{found}.lock"), pytest.MonkeyPatch.context() as patch:
        if not found.exists():
            patch.chdir(tmp_path_factory.mktemp("working_directory"))
            making = tmp_path_factory.mktemp("being-trained")
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            with s3_server() as options:
                launch("two", making, f"s3://{new_bucket('s3', options)}/trial", json.dumps(options))
            launch("one", making, ranks=1)
            if SHARDS:
                launch("three", making, ranks=3)
            launch("lightning", making)
            making.rename(found)
    return found
