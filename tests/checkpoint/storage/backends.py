"""Storages of every kind for the tests, real servers among them, and one that fails on demand."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import torch
from fsspec.implementations.memory import MemoryFileSystem

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
from det_lightning.ranks.topology import free_port
from tests.checkpoint.made_checkpoints import make_resume

STATE: dict[str, Any] = {
    "models_state_dict": [{"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)}],
    "callbacks": {"mine": {"count": 3, "nested": [(1, 2.5, None)], "array": np.arange(4)}},
}
RESUME = make_resume()


@dataclasses.dataclass(frozen=True)
class Backend:
    """A location for a storage: its URL, and the options of its file system."""

    url: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def storage(self, below: str = "") -> CheckpointStorage:
        return CheckpointStorage(f"{self.url}{below}", options=self.options)


def files_of(steps: int = 7, notes: dict[str, Any] | None = None) -> CheckpointContent:
    load_data = {"trial_cls_spec": "m:T", "hparams": None, "experiment_config": None, "is_trainer": True}
    return CheckpointContent(STATE, TrialState(batches_trained=steps), load_data, RESUME, notes=notes or {})


def write(storage: CheckpointStorage, steps: int = 7, notes: dict[str, Any] | None = None) -> str:
    """Write a checkpoint, and return its id."""
    return storage.write(files_of(steps, notes))


def all_paths(storage: CheckpointStorage) -> list[str]:
    """Return everything that lies in a storage."""
    return sorted(storage.root.find_files())


def writing_threads() -> list[threading.Thread]:
    """Return the threads that write checkpoints in the background."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


# Kinds of storage


class FlakyFileSystem(MemoryFileSystem):
    """Memory, but the next calls that write fail as often, and in the way, that a test says."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[list[BaseException]] = []
    only_named: ClassVar[str] = ""
    undeletable: ClassVar[str] = ""

    @classmethod
    def fail(cls, *failures: BaseException, only_named: str = "") -> None:
        cls.failures[:] = failures
        cls.only_named = only_named
        cls.undeletable = ""

    def _may_fail(self, path: str) -> None:
        if self.failures and self.only_named in path:
            raise self.failures.pop(0)

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        self._may_fail(rpath)
        super().put_file(lpath, rpath, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> None:
        self._may_fail(path)
        super().pipe_file(path, *args, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._may_fail(path2)
        super().cp_file(path1, path2, **kwargs)

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        if self.undeletable and self.undeletable in path:
            raise PermissionError(f"{path} must stay")
        super().rm(path, *args, **kwargs)


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Run an S3 server; give the options with which s3fs reaches it."""
    import moto.server

    server = moto.server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {"endpoint_url": f"http://{host}:{port}", "key": "the key", "secret": "the secret"}
    finally:
        server.stop()


def new_bucket(protocol: str, options: dict[str, Any]) -> str:
    """Make a bucket, or a container; return its name."""
    name = f"bucket-{uuid.uuid4()}"
    fsspec.filesystem(protocol, **options).mkdir(name)
    return name


@contextlib.contextmanager
def gcs_server() -> Iterator[dict[str, Any]]:
    """Run a server of Google Cloud Storage; give the options with which gcsfs reaches it."""
    from gcp_storage_emulator.server import create_server

    port = free_port("127.0.0.1")
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    try:
        yield {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "project"}
    finally:
        server.stop()


@contextlib.contextmanager
def azure_server() -> Iterator[dict[str, Any]]:
    """Run Azurite, Microsoft's server of Azure Blob Storage; give the options with which adlfs reaches it."""
    port = free_port("127.0.0.1")
    flags = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--blobPort", str(port)]
    account, key = "tests", base64.b64encode(b"the key").decode()
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"}
    with subprocess.Popen([os.environ["DET_LIGHTNING_AZURITE"], *flags], env=environment) as server:
        for _ in range(200):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        settings = f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};"
        try:
            yield {"connection_string": f"{settings}BlobEndpoint=http://127.0.0.1:{port}/{account}"}
        finally:
            server.terminate()


@contextlib.contextmanager
def sftp_server() -> Iterator[dict[str, Any]]:
    """Run an SFTP server on the files of this machine; give host and options with which fsspec reaches it."""
    import paramiko

    def or_code(action: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function return the code of its error, or that of success in place of nothing."""

        def act(self: Files, *arguments: Any) -> Any:
            try:
                result = action(*arguments)
            except OSError as e:
                return paramiko.SFTPServer.convert_errno(e.errno or 0)
            return paramiko.SFTP_OK if result is None else result

        return act

    def describe(path: str, follow: bool = True) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(os.stat(path, follow_symlinks=follow), Path(path).name)  # noqa: PTH116

    def open_file(path: str, flags: int, attributes: Any) -> paramiko.SFTPHandle:
        handle = paramiko.SFTPHandle(flags)
        file = os.fdopen(os.open(path, flags, 0o644), "wb" if flags & os.O_WRONLY else "rb")
        handle.readfile = handle.writefile = file
        return handle

    class Files(paramiko.SFTPServerInterface):
        list_folder = or_code(lambda path: [describe(str(one), follow=False) for one in Path(path).iterdir()])
        stat = or_code(describe)
        lstat = or_code(lambda path: describe(path, follow=False))
        open = or_code(open_file)
        remove = or_code(os.unlink)
        mkdir = or_code(lambda path, attributes: Path(path).mkdir())
        rmdir = or_code(os.rmdir)
        rename = posix_rename = or_code(os.replace)

    class Gate(paramiko.ServerInterface):
        def check_auth_password(self, username: str, password: str) -> int:
            return paramiko.AUTH_SUCCESSFUL if password == "the password" else paramiko.AUTH_FAILED

        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_SUCCEEDED

        def get_allowed_auths(self, username: str) -> str:
            return "password"

    key = paramiko.ECDSAKey.generate()
    listening = socket.create_server(("127.0.0.1", 0))
    transports: list[paramiko.Transport] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                # Otherwise the end of each answer waits 40 ms, until the client acknowledges its beginning.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                transport = paramiko.Transport(connection)
                transport.add_server_key(key)
                transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
                transport.start_server(server=Gate())
                transports.append(transport)

    threading.Thread(target=serve, daemon=True).start()
    try:
        login = {"username": "me", "password": "the password", "look_for_keys": False, "allow_agent": False}
        yield {"port": listening.getsockname()[1], **login}
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for transport in transports:
            transport.close()


def backend_of(kind: str, directory: Path, server: dict[str, Any]) -> Backend:
    """Return an empty location of a kind."""
    if kind in ("s3", "gs", "az"):
        return Backend(f"{kind}://{new_bucket(kind, server)}/some/prefix", server)
    urls = {
        "directory": str(directory / "storage"),
        "file URL": f"file://{directory}/storage",
        "memory": f"memory://{uuid.uuid4()}/storage",
        "sftp": f"sftp://127.0.0.1{directory}/storage",
    }
    return Backend(urls[kind], server)
