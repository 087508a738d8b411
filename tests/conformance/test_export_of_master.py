"""What the real command line prints annotates the real one's checkpoints, and both still load them.

The commands of docs/master.md are run against a server that answers as a master does.
"""

from __future__ import annotations

import contextlib
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

from det_lightning.checkpoint.format.master_export import MasterExport
from det_lightning.cli.app import app
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.cli.exported import describe_experiment, describe_trial, list_checkpoints
from tests.conformance.sides import SIDES, frozen, run
from tests.conformance.test_same_checkpoints import checkpoints, load
from tests.conformance.trials import Basic

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


@contextlib.contextmanager
def run_master(found: dict[str, Any]) -> Iterator[str]:
    """Answer each path with what was found for it; yield the URL."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = found.get(self.path.partition("?")[0])
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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="`det dev curl` needs curl")
def test_commands_of_the_page_annotate_a_storage(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    for _ in range(2):
        write_checkpoint(storage, 10, by_determined=True)
    one, other = sorted(path.name for path in storage.iterdir())
    (script,) = re.findall(r"```sh\n(mkdir export\n.*?)```", PAGE.read_text(), re.DOTALL)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    user = {"HOME": str(tmp_path), "DET_USER": "admin", "DET_PASS": "None-of-1"}
    with run_master(answers({7: {one: (10, 0.5)}, 8: {other: (10, 0.75)}})) as master:
        settings = {**os.environ, "PATH": path, **user, "DET_MASTER": master}
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=settings, check=True, timeout=300)
    files = sorted((tmp_path / "export").iterdir())
    assert [file.name for file in files] == ["checkpoints-3.json", "experiment-3.json", "trial-7.json", "trial-8.json"]
    result = CliRunner().invoke(app, ["checkpoint", "annotate", str(storage), *map(str, files)])
    assert "2 annotated, 0 unchanged." in result.output
    best = CliRunner().invoke(app, ["checkpoint", "ls", str(storage), "--best", "--json"])
    assert [entry["metric"]["value"] for entry in json.loads(best.stdout)["checkpoints"]] == [0.75, 0.5]


UUID = "11111111-2222-3333-4444-555555555555"
OTHER = "22222222-2222-3333-4444-555555555555"


def printed(content: Any) -> Any:
    """Return what the real classes make of a content, as they print it; unknown or missing keys are errors."""
    from determined.common.api import bindings

    if isinstance(content, list):
        return [printed(element) for element in content]
    if "checkpoints" in content:
        return bindings.v1GetExperimentCheckpointsResponse.from_json(content).to_json()
    if "experiment" in content:
        return bindings.v1GetExperimentResponse.from_json(content).to_json()
    described = bindings.v1GetTrialResponse.from_json(content).to_json()
    workloads = [bindings.v1WorkloadContainer.from_json(workload).to_json() for workload in content["workloads"]]
    return {**described, "workloads": workloads}


def known_from(*contents: Any) -> list[Any]:
    """Return all that is read from outputs."""
    export = MasterExport({f"file {index}": json.dumps(content).encode() for index, content in enumerate(contents)})
    checkpoints_in = export.checkpoints.values()
    return [(one, export.make_entries(one), export.find_config(one)) for one in checkpoints_in]


def test_outputs_are_those_of_the_real_tool() -> None:
    contents = ([describe_experiment()], describe_trial(7, {UUID: (10, 0.5)}), list_checkpoints(8, {OTHER: (10, 1.0)}))
    assert known_from(*map(printed, contents)) == known_from(*contents)


def test_both_load_an_annotated_checkpoint(tmp_path: Path) -> None:
    written = run("determined", Basic, max_length=7, checkpoint_policy="none")
    (path,) = checkpoints()
    files = [tmp_path / "experiment.json", tmp_path / "trial.json"]
    for file, content in zip(files, ([describe_experiment()], describe_trial(7, {path.name: (7, 0.5)})), strict=True):
        file.write_text(json.dumps(printed(content)))
    result = CliRunner().invoke(app, ["checkpoint", "annotate", str(path.parent), *map(str, files)])
    assert "1 annotated" in result.output
    assert json.loads((path / "metadata.json").read_text())["metric"]["value"] == 0.5
    for side in SIDES:
        models = load(side, path, Basic).context.models
        assert frozen([model.state_dict() for model in models]) == written.final["weights"]
