"""Processor time of ``det-lightning checkpoint ls`` of many local checkpoints, and of reading their metadata by hand.

python benchmarks/listing.py [--checkpoints 20000]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState

CHECKPOINTS = 20_000
# The least that a listing has to do: the size of each file, and the content of metadata.json.
BY_HAND = """
import json, os, sys
for checkpoint in os.scandir(sys.argv[1]):
    size = sum(entry.stat().st_size for entry in os.scandir(checkpoint) if entry.is_file())
    with open(os.path.join(checkpoint, "metadata.json"), "rb") as file:
        json.loads(file.read())
"""


def make_storage(folder: pathlib.Path, count: int) -> None:
    """Write one checkpoint, and copy it."""
    (folder / "code").mkdir()
    storage = CheckpointStorage(folder / "checkpoints")
    first = storage.root.local_path / storage.write(CheckpointContent({}, TrialState(1)), code=folder / "code")
    for _ in range(count - 1):
        shutil.copytree(first, first.with_name(str(uuid.uuid4())))


def processor_s(*command: object) -> float:
    """Return the processor time of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def figures(short: bool = False, count: int = CHECKPOINTS) -> dict[str, float]:
    """Return the processor times, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        make_storage(pathlib.Path(folder), 1000 if short else count)
        storage = pathlib.Path(folder) / "checkpoints"
        by_hand = processor_s("-c", BY_HAND, storage)
        listed = processor_s("-m", "det_lightning.cli", "checkpoint", "ls", storage)
    return {"by_hand_s": by_hand, "ls_s": listed, "ls_to_by_hand": listed / by_hand}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS)
    print(json.dumps(figures(count=parser.parse_args().checkpoints), indent=2))
