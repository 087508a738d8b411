"""Runs the benchmarks and writes one JSON file with their figures.

    python benchmarks/run_all.py [--short] [--only overhead,start] [--output benchmarks/history.json]

Every module beside this one that has a function ``figures(short: bool = False) -> dict[str, float]`` is a benchmark. A
short run takes minutes on a quiet machine, and leaves out what needs many repetitions.

The file is a list with an entry for each commit, the oldest first; a second run of a commit adds to its entry and
replaces figures of the same name. An entry has no name of a host and no path.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
HISTORY = HERE / "history.json"
PACKAGES = ("torch", "pytorch-lightning", "determined", "numpy")


def find_benchmarks() -> list[str]:
    """Return the names of the modules that have the function ``figures``."""
    return sorted(
        path.stem for path in HERE.glob("*.py") if re.search(r"^def figures\(", path.read_text(encoding="utf-8"), re.M)
    )


def describe_machine() -> str:
    """Return what kind of machine this is, as far as it decides about figures."""
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([platform.system(), platform.machine(), f"{os.cpu_count()} cores", *devices])


def describe_run() -> dict[str, Any]:
    """Return what the figures belong to: commit, date, versions, machine."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "../det_lightning", "../adapters", "../callbacks"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    if changed.stdout:
        raise SystemExit("There are changes that are not committed, so that the figures would belong to no commit.")
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a benchmark that needs it says so
    return installed


def add_entry(history: Sequence[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the history with an entry added, or joined with that of its commit."""
    earlier = [known for known in history if known["commit"] != entry["commit"]]
    same = [known for known in history if known["commit"] == entry["commit"]]
    before = same[0]["figures"] if same else {}
    return [*earlier, {**entry, "figures": {**before, **entry["figures"]}}]


def write_entry(file: pathlib.Path, entry: dict[str, Any]) -> None:
    """Add an entry to the history in a file, which need not exist."""
    history = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    file.write_text(json.dumps(add_entry(history, entry), indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="only the main figures, from few repetitions")
    parser.add_argument("--only", default=",".join(find_benchmarks()), help="some of the benchmarks, by module")
    parser.add_argument("--output", type=pathlib.Path, default=HISTORY)
    arguments = parser.parse_args()
    entry = describe_run()
    sys.path.insert(0, str(HERE))
    for name in arguments.only.split(","):
        print(f"{name} ...", flush=True)
        found = importlib.import_module(name).figures(short=arguments.short)
        entry["figures"] = {f"{name}/{figure}": value for figure, value in found.items()}
        for figure, value in entry["figures"].items():
            print(f"{figure:60} {value:g}", flush=True)
        # After each, because a later one may fail.
        write_entry(arguments.output, entry)


if __name__ == "__main__":
    main()
