"""A callback that records the metrics of a training run and plots them; a directory for each run."""

import itertools
import os
import pathlib
from typing import Any

from det_lightning import pytorch


def new_directory(parent: pathlib.Path) -> pathlib.Path:
    """Return the first of run-1, run-2, ... that does not exist, so that no two runs are mixed."""
    candidates = (parent / f"run-{number}" for number in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


class History(pytorch.PyTorchCallback):
    """Record loss and accuracy of every training batch and every validation.

    Attributes:
        training: (loss, accuracy) of each batch.
        validation: (batches trained before it, loss, accuracy) of each validation.
    """

    def __init__(self) -> None:
        self.training: list[tuple[float, float]] = []
        self.validation: list[tuple[int, float, float]] = []

    def best(self) -> tuple[int, float, float]:
        """Return the entry of the validation with the lowest loss."""
        return min(self.validation, key=lambda entry: entry[1])

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.training += [(float(m["loss"]), float(m["accuracy"])) for m in batch_metrics]

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        loss, accuracy = float(metrics["validation_loss"]), float(metrics["validation_accuracy"])
        self.validation.append((len(self.training), loss, accuracy))

    def state_dict(self) -> dict[str, Any]:
        return {"training": self.training, "validation": self.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.training, self.validation = list(state_dict["training"]), list(state_dict["validation"])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Save a plot of the curves."""
        import matplotlib  # only needed for the plot

        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        self._draw_curves(left, column=0)
        left.set_title("Loss (cross-entropy)", loc="left")
        left.set_yscale("log")
        left.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        self._draw_curves(right, column=1)
        right.set_title("Accuracy (images classified correctly)", loc="left")
        right.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        right.legend(loc="lower right", frameon=False)
        figure.savefig(path, dpi=90)
        pyplot.close(figure)

    def _draw_curves(self, axes: Any, column: int) -> None:
        """Draw one metric: training as the mean between two validations, each validation, and the best one."""
        values = [metrics[column] for metrics in self.training]
        ends = [batches for batches, *_ in self.validation]
        spans = [(start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]
        axes.plot([(a + b) / 2 for a, b in spans], [sum(values[a:b]) / (b - a) for a, b in spans], label="training")
        axes.plot(ends, [metrics[column] for _, *metrics in self.validation], marker=".", label="validation")
        batches, *best = self.best()
        axes.plot(batches, best[column], "o", color="black", fillstyle="none", markersize=10, label="best checkpoint")
        axes.set_xlabel("batches")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
