"""Servers for the tests of storages, and nothing of this machine's own credentials."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint.storage import backends
from tests.checkpoint.storage.backends import Backend, FlakyFileSystem


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp() / "no such file"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


# Options with which the libraries reach the servers of this session.


@pytest.fixture(scope="session")
def sftp_options() -> Iterator[dict[str, Any]]:
    pytest.importorskip("paramiko", reason="no SFTP server to test with; install paramiko")
    with backends.sftp_server() as options:
        yield options


@pytest.fixture(scope="session")
def gcs_options() -> Iterator[dict[str, Any]]:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator", reason="no GCS server to test with; install gcp-storage-emulator")
    with backends.gcs_server() as options:
        yield options


@pytest.fixture(scope="session")
def azure_options() -> Iterator[dict[str, Any]]:
    with backends.azure_server() as options:
        yield options


SERVERS = {"s3": "s3_options", "gs": "gcs_options", "sftp": "sftp_options"}
if "DET_LIGHTNING_AZURITE" in os.environ:
    SERVERS["az"] = "azure_options"

# Together they take most of the time of these tests.
SLOW_SERVERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in SERVERS]
SLOW_OBJECT_STORES = [pytest.param(kind, marks=pytest.mark.slow) for kind in SERVERS if kind != "sftp"]


@pytest.fixture(params=["directory", "file URL", "memory", *SLOW_SERVERS])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """An empty location for a storage, of every kind in turn."""
    yield _place(request, tmp_path)
    MemoryFileSystem.store.clear()


@pytest.fixture(params=["memory", *SLOW_OBJECT_STORES])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """An empty location on a remote storage."""
    yield _place(request, tmp_path)
    MemoryFileSystem.store.clear()


def _place(request: pytest.FixtureRequest, directory: Path) -> Backend:
    kind = request.param
    return backends.backend_of(kind, directory, request.getfixturevalue(SERVERS[kind]) if kind in SERVERS else {})


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies for a remote storage lie."""
    (tmp_path / "staging").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "staging"))
    return tmp_path / "staging"


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """A storage that fails on demand; see :class:`FlakyFileSystem`. What it refuses is kept among pytest's files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("kept")))
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.fail()
    yield Backend("flaky://storage")
    FlakyFileSystem.fail()
    FlakyFileSystem.store.clear()
