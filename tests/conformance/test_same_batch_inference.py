"""Batch inference beside the real one: the same batches on each rank, the same checkpoints, the same files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.batch_ranks import checkpoints_in, main
from tests.conformance.ranks import launch
from tests.conformance.sides import SIDES

CASES: dict[str, dict[str, Any]] = {
    "by the defaults": {"records": 7},
    "the end is between checkpoints": {"records": 21, "batch_size": 2, "checkpoint_interval": 3},
    "the end is a checkpoint": {"records": 24, "batch_size": 2, "checkpoint_interval": 3},
    "the last batch is dropped": {"records": 21, "dataloader_kwargs": {"batch_size": 4, "drop_last": True}},
    "fewer batches": {"records": 21, "batch_size": 2, "max_batches": 3, "checkpoint_interval": 2},
    "more batches than there are": {"records": 9, "batch_size": 2, "max_batches": 30},
    "a negative number of batches": {"records": 9, "batch_size": 2, "max_batches": -1},
    "no records": {"records": 0},
    "resumed": {
        "records": 21,
        "batch_size": 2,
        "checkpoint_interval": 2,
        "runs": [{"max_batches": 3}, {"resumes": True}],
    },
    "resumed at the end": {"records": 9, "batch_size": 2, "runs": [{}, {"resumes": True}]},
    "the order is shuffled": {"records": 9, "dataloader_kwargs": {"shuffle": True}},
    "a sampler": {"records": 9, "dataloader_kwargs": {"sampler": None}},
    "two batch sizes": {"records": 9, "batch_size": 2, "dataloader_kwargs": {"batch_size": 2}},
    "no checkpoints": {"records": 9, "checkpoint_interval": 0},
}

Found = dict[str, Any]


def describe(folder: Path, name: str, ranks: int) -> Found:
    """Return what a case has led to: calls of the processor on each rank, checkpoints, and files."""
    storage = folder / name
    checkpoints = checkpoints_in(storage)
    contents = [{file.name: json.loads(file.read_text()) for file in path.iterdir()} for path in checkpoints]
    outputs = {content["metadata.json"].pop("default_output_uuid") for content in contents}
    for content in contents:
        content["metadata.json"].pop("records_per_step", None)  # of ours
    others = {path for path in storage.glob("*/") if path not in checkpoints and not path.name.startswith(".")}
    files = [(path, other) for other in others for path in other.rglob("*") if path.is_file()]
    return {
        "events": [json.loads((folder / f"{rank}.json").read_text())[name] for rank in range(ranks)],
        "checkpoints": contents,
        "outputs": len(outputs),
        "the files are in the output that the checkpoints name": {path.name for path in others} == outputs,
        "files": {path.relative_to(other).as_posix(): path.read_text() for path, other in files},
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What every case has led to, on either side."""
    ranks: int = request.param
    sides = []
    for side in SIDES:
        output = tmp_path_factory.mktemp(side)
        if ranks == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(output)
                main(side, copy.deepcopy(CASES), output)
        else:
            launch("batch_ranks", side, CASES, output, ranks)
        sides.append({name: describe(output, name, ranks) for name in CASES})
    return sides


@pytest.mark.parametrize("name", CASES)
def test_either_processes_the_same(found: list[dict[str, Found]], name: str) -> None:
    theirs, ours = (side[name] for side in found)
    assert ours == theirs
    assert theirs["events"][0][0]
