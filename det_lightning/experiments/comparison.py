"""Several experiments side by side: the best trial of each, in the form of ``experiment show``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from det_lightning.experiments.trial_table import split_metric

#: Columns in addition to those of ``experiment show``.
COLUMNS = ("trials", "metric", "seed")


def compare_experiments(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one experiment with the best trial of each, or the first trial of an experiment without a metric.

    ``best_trial`` is the best of all trials if the experiments have the same metric. Raise a ``ValueError`` if an
    experiment has no trial.
    """
    names = [details["directory"].rstrip("/").rpartition("/")[2] for details in found]
    if len(set(names)) < len(names):
        names = [f"{details['directory']} ({details['id']})" for details in found]
    trials = [_choose_trial(details, name) for details, name in zip(found, names, strict=True)]
    metrics = {details["metric"] for details in found}
    _, is_larger_better = split_metric(found[0])
    ranked = [trial for trial in trials if trial["best"] is not None] if len(metrics) == 1 else []
    best = (max if is_larger_better else min)(ranked, key=lambda trial: trial["best"], default=None)
    return {
        "name": f"Comparison of {len(found)} experiments",
        "metric": found[0]["metric"] if len(metrics) == 1 else None,
        "best": None if best is None else best["best"],
        "best_trial": None if best is None else best["id"],
        "messages": [],
        "trials": trials,
    }


def _choose_trial(details: dict[str, Any], name: str) -> dict[str, Any]:
    trials = details["trials"]
    if not trials:
        raise ValueError(f"The experiment in {details['directory']} has no trials yet.")
    trial = next((trial for trial in trials if trial["id"] == details["best_trial"]), trials[0])
    label = f"{name}, trial {trial['id']}" if len(trials) > 1 else name
    metric, _ = split_metric(details)
    return {"seed": None, **trial, "id": label, "trials": len(trials), "metric": metric}
