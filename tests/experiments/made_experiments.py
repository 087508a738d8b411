"""An experiment as its files describe it, made by hand: no trial runs, and no torch is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from det_lightning.experiments.directory import ExperimentDirectory
from det_lightning.experiments.event_log import EventLog

NAME = "a <search>"


def made_experiment(parent: Path, trials: int = 3) -> ExperimentDirectory:
    """Write a finished experiment.

    Trial ``i`` has the loss ``i / 10`` after 10 batches and ``i / 20`` after 20, and the checkpoints ``i-10`` and
    ``i-20``.
    """
    directory = ExperimentDirectory.create(parent, NAME)
    searcher = {"metric": "loss", "smaller_is_better": True}
    space = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0}}
    directory.config_file.write_text(json.dumps({"name": NAME, "searcher": searcher, "hyperparameters": space}))
    log = EventLog(directory.events)
    log.append({"type": "experiment_started", "time": 0.0})
    for trial in range(1, trials + 1):
        hparams = {"lr": 10.0**-trial, "layers": trial, "kind": "ab"[trial % 2], "password": "hidden", "constant": 5}
        log.append({"type": "trial_created", "time": 1.0, "trial": trial, "seed": trial, "hparams": hparams})
        log.append({"type": "run_started", "time": 1.0, "trial": trial, "run": 1})
        for steps in (10, 20):
            at = {"time": 2.0, "trial": trial, "lines": steps, "steps_completed": steps}
            log.append({"type": "validation", **at, "metrics": {"loss": trial / steps}})
            log.append({"type": "checkpoint", **at, "checkpoint_id": f"{trial}-{steps}"})
            (directory.checkpoints / f"{trial}-{steps}").mkdir(parents=True)
            (directory.checkpoints / f"{trial}-{steps}" / "metadata.json").write_text("{}")
        ended = {"status": 0, "failed": False, "paused": False, "closed": "COMPLETED", "reason": None}
        log.append({"type": "run_ended", "time": 3.0, "trial": trial, **ended})
    log.append({"type": "experiment_ended", "time": 3.0, "outcome": "COMPLETED"})
    log.close()
    return directory


def change_config(directory: ExperimentDirectory, **sections: object) -> ExperimentDirectory:
    """Replace sections of an experiment's configuration, and return the experiment as another command finds it."""
    config = json.loads(directory.config_file.read_text())
    directory.config_file.write_text(json.dumps({**config, **sections}))
    return ExperimentDirectory(directory.path)


def make_details(validation: list[tuple[int, float]], training: list[tuple[int, float]]) -> dict[str, Any]:
    """Return the description of an experiment with a trial of these losses by batch, as for a page."""
    batches, best = min(validation, key=lambda point: point[1])
    unknown = dict.fromkeys(("latest", "restarts", "checkpoint", "checkpoint_batches", "checkpoint_exists", "hparams"))
    curves = {"loss": validation, "training loss": training} if training else {"loss": validation}
    known = {"id": 1, "state": "COMPLETED", "batches": batches, "nodes": [], "curves": curves}
    trial = {**unknown, **known, "best": best, "best_batches": batches}
    described = {"name": "a-run", "metric": "loss (smaller is better)", "logarithmic": [], "messages": []}
    return {**described, "best": best, "best_trial": 1, "trials": [trial]}
