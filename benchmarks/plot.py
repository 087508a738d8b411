"""Plots the main figures over the commits, from ``history.json``, and writes ``docs/benchmarks.svg``.

    python benchmarks/plot.py

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
MAIN_FIGURES = {
    "overhead/base/ours/calls": "training batch",
    "overhead/tensorboard/ours/calls": "training batch, TensorBoard",
    "overhead/validation/ours/calls": "validation batch",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=pathlib.Path, default=HERE / "history.json")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "docs" / "benchmarks.svg")
    arguments = parser.parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "det_lightning"  # the same figures make the same file
    from matplotlib import pyplot as plt

    history = json.loads(arguments.history.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name, label in MAIN_FIGURES.items():
        known = [(entry["commit"][:7], entry["figures"][name]) for entry in history if name in entry["figures"]]
        axes.plot([commit for commit, _ in known], [value for _, value in known], marker="o", label=label)
    axes.set_ylabel("calls added, relative to determined")
    axes.axhline(0, color="black", linewidth=0.8)  # the plain loop
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
