"""Reports to look at, of records made by hand: no torch is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_lightning.testing.checks import CheckResult
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.record import RunSettings, TrainingRecord
from det_lightning.testing.report import write_report

CHECKS = (
    CheckResult("trains", "passed", 1.25),
    CheckResult("is deterministic under a seed", "passed", 2.5),
    CheckResult("an old checkpoint loads", "skipped", 0.0, "no --trial-checkpoint was given"),
)
DETAILS = "<loss> differs\n  - at batch 3\n  - & at all later ones"
BROKEN = CheckResult("matches the real determined", "failed", 4.0, DETAILS)


def made_record(
    side: str, losses: Sequence[float], accuracies: Sequence[float] = (), environment: Mapping[str, Any] | None = None
) -> TrainingRecord:
    """Return a record with these training metrics, and validation metrics after every second batch."""
    events: list[dict[str, Any]] = []
    for batch, loss in enumerate(losses):
        metrics = {"loss": {"~": "number", "dtype": "float32", "value": loss}}
        fields: dict[str, Any] = {"metrics": metrics, "gradients": {}, "weights": {}, "random": {}}
        events.append({"event": "batch_end", "batch": batch, **fields})
        if (batch + 1) % 2 == 0 and batch // 2 < len(accuracies):
            events.append({"event": "validation", "batch": batch + 1, "metrics": {"accuracy": accuracies[batch // 2]}})
    known: dict[str, Any] = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"}
    known |= {"platform": "Linux", "processor": "a CPU"}
    known |= {"side": side, side: "1.2.3", "threads": 2, "device": "cpu", "hooks": [], **(environment or {})}
    settings = RunSettings(hparams={"lr": 0.1}, batches=len(losses))
    return TrainingRecord("model_def:MyTrial", settings, known, tuple(events), len(losses))


def falling(length: int) -> list[float]:
    return [2.5 * math.exp(-batch / 5) + 0.1 * math.cos(batch) for batch in range(length)]


def made_report(kind: str, directory: Path) -> Path:
    """Write the report of a trial that is ``"equal"``, ``"different"``, ``"alone"`` or ``"bare"``; return its path."""
    path = directory / f"{kind}.html"
    command = "pytest --trial model_def:MyTrial --trial-report out.html"
    if kind == "bare":
        write_report(path, "model_def:MyTrial", [], {})
        return path
    losses = falling(20)
    ours = made_record("det_lightning", losses, [0.5, 0.75, 0.8])
    if kind == "alone":
        write_report(path, "model_def:MyTrial", CHECKS, {"ours": ours}, command=command)
        return path
    other = {"torch": "1.12.1", "python": "3.8.18"} if kind == "different" else {}
    there = [loss * (1 if batch < 3 or kind == "equal" else 1.2) for batch, loss in enumerate(losses)]
    reference = made_record("determined", there, [0.5, 0.75, 0.8], other)
    checks = CHECKS if kind == "equal" else (*CHECKS, BROKEN)
    records = {"reference": reference, "ours": ours}
    write_report(path, "model_def:MyTrial", checks, records, first_difference(reference, ours), command)
    return path
