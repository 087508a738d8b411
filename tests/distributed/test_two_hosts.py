"""Two network namespaces as two hosts, with one process each, train what two processes on one host do."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import TORCHRUN, end_of, environment, start, wait

pytestmark = pytest.mark.slow

NAME = f"dl{os.getpid() % 100000}"
ADDRESSES = ("10.213.87.1", "10.213.87.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces that see each other through a cable, and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("NOT TESTED: two hosts. There is no command ip; install the package iproute2.")
    names = [f"{NAME}{index}" for index in range(2)]
    with contextlib.ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
            cable = [argument for name in names for argument in ("peer", "name", f"v{name}", "netns", name)]
            ip("link", "add", *cable[1:5], "type", "veth", *cable[5:])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", f"v{name}")
                ip("-n", name, "link", "set", f"v{name}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"NOT TESTED: two hosts. Network namespaces cannot be made here (as root?): {error.stderr}")
        yield names


def test_two_hosts_train_as_one(hosts: list[str], tmp_path: Path) -> None:
    """With restarts the ranks do not meet at torchrun's store but at one that the chief runs, on port 12360."""
    alone = start(tmp_path / "one_host", launcher=TORCHRUN)
    restarting = ["det_lightning.launch.torch_distributed", "--max-restarts", "1"]
    kinds: dict[str, Any] = {
        "torchrun": (["torch.distributed.run"], [], {}),
        "launcher": (restarting, ["--"], {"DET_CHIEF_IP": ADDRESSES[0]}),
    }
    ended = []
    for kind, (launcher, split, variables) in kinds.items():
        folder = tmp_path / kind
        (folder / "checkpoints").mkdir(parents=True)
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", NAME]
        started = []
        for index, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
            # Hosts of their own would find out by their names which of them is meant.
            meeting += ["--rdzv-conf", f"is_host={int(index == 0)}"]
            options = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", address, *meeting]
            command = [sys.executable, "-m", *launcher, *options, *split, "-m", "tests.ending", str(folder)]
            env = environment(GLOO_SOCKET_IFNAME=f"v{host}", **variables)
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(["ip", "netns", "exec", host, *command], cwd=folder, env=env, **pipes))
        ended += [wait(process) for process in started]
    ended.append(wait(alone))
    assert [one.status for one in ended] == [0] * 5, "\n".join(one.output for one in ended)
    expected = end_of(tmp_path / "one_host")["weights"]
    for kind in kinds:
        assert all(torch.equal(end_of(tmp_path / kind, rank)["weights"], expected) for rank in range(2)), kind
