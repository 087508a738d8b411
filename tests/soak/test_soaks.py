"""Each soak test, for seconds in place of minutes, finds nothing and comes to what it looks for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launching import environment
from tests.warm_python import start_warm_python

#: Arguments, and how often something has to happen.
SOAKS: dict[str, tuple[str, dict[str, int]]] = {
    # Some kills come in the middle of writing, and each of the four variants comes to its end.
    "kill_training": ("--kills 12", {"kills": 12, "torn": 1, "ends": 4}),
    "interrupt_training": ("--moments 12", {"moments": 12, "in checkpoint write": 1}),
    # All runs are trials of their own.
    "share_storage": ("--rounds 8 --runs 3", {"rounds": 8, "trials": 24}),
    # Many files are still good, and many are refused.
    "fuzz_checkpoints": (
        "--inputs 500 --workers 2",
        {"inputs": 500, "read_checkpoint: read": 50, "read_checkpoint: UnsafeCheckpointError": 50},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOAKS)
def test_soak_finds_nothing(name: str, tmp_path: Path) -> None:
    arguments, expected = SOAKS[name]
    command = [start_warm_python().executable, str(Path(__file__).with_name(f"{name}.py"))]
    command += [*arguments.split(), "--seed", "1", "--json", "outcome.json"]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=False)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["findings"] == []
    assert [what for what, least in expected.items() if outcome.get(what, 0) < least] == []
