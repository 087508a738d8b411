"""The commands of docs/master.md, run by the real command line against a server that answers as a master does."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from det_lightning.cli.app import app
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.cli.exported import describe_experiment, describe_trial, list_checkpoints

pytest.importorskip("determined", reason="the real determined is not installed; run tox -e conformance")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="`det dev curl` needs curl"),
]

PAGE = Path(__file__).parents[2] / "docs" / "master.md"
USER = {"username": "admin", "admin": True, "active": True}


def answers(checkpoints: dict[int, dict[str, tuple[int, float]]]) -> dict[str, Any]:
    """Return what a master with one experiment answers, by path; ``checkpoints`` are those of each trial."""
    trials = {trial_id: describe_trial(trial_id, own) for trial_id, own in checkpoints.items()}
    of_trials = [list_checkpoints(trial_id, own)["checkpoints"] for trial_id, own in checkpoints.items()]
    listed = [checkpoint for of_trial in of_trials for checkpoint in of_trial]
    pages = {"offset": 0, "limit": 0, "startIndex": 0, "endIndex": 1, "total": 1}
    found: dict[str, Any] = {
        "/info": {"version": "0.38.1", "masterId": "m", "clusterId": "c", "clusterName": ""},
        "/api/v1/auth/login": {"token": "t", "user": USER},
        "/api/v1/me": {"user": USER},
        "/api/v1/experiments": {"experiments": [describe_experiment()["experiment"]], "pagination": pages},
        "/api/v1/experiments/3": describe_experiment(),
        "/api/v1/experiments/3/checkpoints": {"checkpoints": listed, "pagination": pages},
        "/api/v1/experiments/3/trials": {"trials": [one["trial"] for one in trials.values()], "pagination": pages},
    }
    for trial_id, described in trials.items():
        found[f"/api/v1/trials/{trial_id}"] = {"trial": described["trial"]}
        found[f"/api/v1/trials/{trial_id}/workloads"] = {"workloads": described["workloads"], "pagination": pages}
    return found


class Master(http.server.ThreadingHTTPServer):
    """Answers each path with what it is given."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        super().__init__(("127.0.0.1", 0), Answering)


class Answering(http.server.BaseHTTPRequestHandler):
    server: Master

    def do_GET(self) -> None:
        answer = self.server.found.get(self.path.partition("?")[0])
        content = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A storage with a checkpoint of each of two trials."""
    for _ in range(2):
        write_checkpoint(tmp_path / "storage", 10, by_determined=True)
    return tmp_path / "storage"


@pytest.fixture
def master(storage: Path) -> Iterator[str]:
    one, other = sorted(path.name for path in storage.iterdir())
    server = Master(answers({7: {one: (10, 0.5)}, 8: {other: (10, 0.75)}}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_commands_of_the_page_annotate_a_storage(master: str, storage: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```sh\n(mkdir export\n.*?)```", PAGE.read_text(), re.DOTALL)
    settings = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "DET_MASTER": master,
        "DET_USER": "admin",
        "DET_PASS": "None-of-1",
    }
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=settings, check=True, timeout=300)
    files = sorted((tmp_path / "export").iterdir())
    assert [file.name for file in files] == ["checkpoints-3.json", "experiment-3.json", "trial-7.json", "trial-8.json"]
    result = CliRunner().invoke(app, ["checkpoint", "annotate", str(storage), *map(str, files)])
    assert "2 annotated, 0 unchanged." in result.output
    best = CliRunner().invoke(app, ["checkpoint", "ls", str(storage), "--best", "--json"])
    assert [entry["metric"]["value"] for entry in json.loads(best.stdout)["checkpoints"]] == [0.75, 0.5]
