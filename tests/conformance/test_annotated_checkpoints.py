"""What the real command line prints annotates the real one's checkpoints, and both still load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from det_lightning.checkpoint.format.master_export import MasterExport
from det_lightning.cli.app import app
from tests.cli.exported import describe_experiment, describe_trial, list_checkpoints
from tests.conformance.sides import SIDES, run
from tests.conformance.test_same_checkpoints import checkpoints, load
from tests.conformance.trials import Basic

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
    run("determined", Basic, max_length=7, checkpoint_policy="none")
    (path,) = checkpoints()
    saved = torch.load(path / "state_dict.pth", weights_only=False)["models_state_dict"]
    files = []
    for name, content in (("e", [describe_experiment()]), ("t", describe_trial(7, {path.name: (7, 0.5)}))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(printed(content)))
    result = CliRunner().invoke(app, ["checkpoint", "annotate", str(path.parent), *map(str, files)])
    assert "1 annotated" in result.output
    assert json.loads((path / "metadata.json").read_text())["metric"]["value"] == 0.5
    for side in SIDES:
        trial = load(side, path, Basic)
        for model, written in zip(trial.context.models, saved, strict=True):
            assert all(torch.equal(model.state_dict()[name], written[name]) for name in written)
