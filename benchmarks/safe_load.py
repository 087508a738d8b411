"""How long it takes to read a checkpoint's state safely, beside plain ``torch.load`` of the same file.

    python benchmarks/safe_load.py [--megabytes 400] [--rounds 7] [--directory DIR]

Both ways take turns in one run, each in a process of its own, for a process that has read a state before gets its
memory faster. The file is read once before, so that no way waits for the disk. Seconds are the median of the rounds;
those of the processors are more reliable where other programs run.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile

MEGABYTES = 400
ROUNDS = 7
WAYS = {
    "torch.load": "import torch; read = lambda: torch.load(path, map_location='cpu', weights_only=True)",
    "read_state": ("from det_lightning.checkpoint.safe_load import read_state; read = lambda: read_state(path)"),
}
MEASURE = "import pathlib, sys, time; path = pathlib.Path(sys.argv[1]); {}\n"
MEASURE += "begun = time.perf_counter(), time.process_time(); state = read(); "
MEASURE += "print(time.perf_counter() - begun[0], time.process_time() - begun[1])"


def write_state(path: pathlib.Path, megabytes: int) -> None:
    """Write the state of a model and its Adam, of so many megabytes in all, in tensors of a megabyte."""
    import torch

    def tensors(count: int) -> list[torch.Tensor]:
        return [torch.randn(512, 512) for _ in range(count)]

    third = max(1, megabytes // 3)
    moments = zip(tensors(third), tensors(third), strict=True)
    optimizer = {
        "state": {i: {"step": torch.tensor(1.0), "exp_avg": a, "exp_avg_sq": b} for i, (a, b) in enumerate(moments)},
        "param_groups": [{"lr": 0.1, "params": list(range(third))}],
    }
    model = {f"layers.{index}.weight": weight for index, weight in enumerate(tensors(third))}
    torch.save({"models_state_dict": [model], "optimizers_state_dict": [optimizer]}, path)


def measure(way: str, path: pathlib.Path) -> list[float]:
    """Return the seconds that one way takes: by the clock, and of all processors."""
    command = [sys.executable, "-c", MEASURE.format(WAYS[way]), str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(seconds) for seconds in printed.split()]


def compare(megabytes: int, rounds: int, directory: str | None = None) -> dict[str, dict[str, float]]:
    """Return the median seconds of each way: by the clock, and of the processors."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = pathlib.Path(folder) / "state_dict.pth"
        write_state(path, megabytes)
        path.read_bytes()
        measured = [{way: measure(way, path) for way in WAYS} for _ in range(rounds)]
    return {
        kind: {way: statistics.median(one[way][index] for one in measured) for way in WAYS}
        for index, kind in enumerate(("clock", "processors"))
    }


def figures(short: bool = False) -> dict[str, float]:
    """Return the time of a safe read relative to ``torch.load``, by the clock and of the processors."""
    found = compare(megabytes=100 if short else MEGABYTES, rounds=3 if short else ROUNDS)
    return {f"{kind}_ratio": round(of["read_state"] / of["torch.load"], 2) for kind, of in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--directory", default=None, help="where to write; by default the temporary directory")
    options = parser.parse_args()
    found = compare(options.megabytes, options.rounds, options.directory)
    print(f"{options.megabytes} MB, {options.rounds} rounds")
    for kind, seconds in found.items():
        plain, safe = seconds.values()
        print(f"{kind}: torch.load {plain:.3f} s, read_state {safe:.3f} s, ratio {safe / plain:.2f}")


if __name__ == "__main__":
    main()
