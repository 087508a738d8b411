"""Does it train, and the same way each time?"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from det_lightning.testing.observation.digests import equal, fingerprint
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.outcomes import CheckFailed
from det_lightning.testing.training.run_differences import first_difference
from det_lightning.testing.training.runs import TrialRuns

__all__ = ["is_deterministic", "listed", "moves_every_parameter", "trains"]

_CAUSES_OF_CHANCE = {
    "data": (
        "a generator of the data that is not seeded: np.random.default_rng(), random.Random(), torch.Generator() "
        "without a seed",
        "worker processes of the loader that seed themselves, such as by the time",
        "files in the order in which the file system lists them (sort them), or the order of a set",
    ),
    "metric": (
        "a generator that is not seeded, such as np.random.default_rng(), or one that is seeded by the time",
        "a draw that depends on the time, on an address in memory, or on the order of a set",
    ),
    "learning rate": ("a scheduler that depends on the time",),
}


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names with commas between them; of many the first ones and how many there are."""
    every = list(names)
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown}, ... ({len(every)} in all)"


def trains(runs: TrialRuns) -> None:
    """It trains to the end, with losses that are numbers."""
    run = runs.straight
    if run.failure is not None and not run.failure.stage.startswith("in the validation"):
        raise runs.explained(run)
    for happening in run.observer.happenings:
        for (kind, name), value in happening.values.items():
            if kind == "metric" and "loss" in name.lower() and _is_not_finite(value):
                raise CheckFailed(
                    f"training metric {name!r} is {float(np.asarray(value)):g} at {happening.place}.",
                    causes=[
                        "a learning rate that is too high for these hyperparameters",
                        "a logarithm or square root of 0, or a division by 0, in the loss",
                    ],
                )


def _is_not_finite(value: object) -> bool:
    try:
        return not math.isfinite(float(np.asarray(value)))
    except (TypeError, ValueError):
        return False


def is_deterministic(runs: TrialRuns) -> None:
    """Two runs with one seed are equal to the bit."""
    one, other = runs.require(runs.straight), runs.again
    if other.failure is not None:
        raise runs.explained(other)
    difference = first_difference(one, other)
    if difference is None:
        return
    causes = _CAUSES_OF_CHANCE.get(difference.kind) or (
        _CAUSES_OF_CHANCE["metric"] if difference.place != "at the end" else ("state that depends on the time",)
    )
    raise CheckFailed(
        f"Two runs with seed {runs.setup.seed} are not the same. First difference: {difference}", causes=causes
    )


def moves_every_parameter(runs: TrialRuns) -> None:
    """Every parameter that wants a gradient gets one, is in an optimizer, and moves."""
    run = runs.require(runs.straight)
    seen = run.observer
    if not seen.trainable:
        raise CheckFailed("No parameter of the wrapped models is trainable: requires_grad is False for all of them.")
    bystanders = _bystanders(seen)
    without = [name for name in seen.trainable if name not in seen.gradients and _model_of(name) not in bystanders]
    homeless = [name for name, optimized in seen.trainable.items() if not optimized and name in seen.gradients]
    still = [
        name
        for name in seen.trainable
        if name in seen.gradients
        and name not in homeless
        and equal(fingerprint(run.final["weights"][name]), seen.initial[name])
    ]
    findings = [
        (without, "never get a gradient", "a layer that the loss does not use, or whose output is detached: leave it "
         "out, or freeze it with requires_grad_(False)"),
        (homeless, "get a gradient, but no wrapped optimizer has them", "the optimizer is built from other "
         "parameters: pass it model.parameters() of what context.wrap_model() returned"),
        (still, "are in an optimizer and get a gradient, but do not move", "a gradient or learning rate of 0 "
         f"throughout the {run.plan.batches} batches (more with --trial-batches), step_optimizer() that is not "
         "called for that optimizer, or gradients that are cleared before the step"),
    ]  # fmt: skip
    broken = [(names, what, cause) for names, what, cause in findings if names]
    if broken:
        raise CheckFailed(
            f"Of {len(seen.trainable)} trainable parameters {sum(len(names) for names, _, _ in broken)} stay as they "
            f"were in {run.plan.batches} batches.",
            [f"{what}: {listed(names)}" for names, what, _ in broken],
            [cause for _, _, cause in broken],
        )


def _bystanders(seen: Observer) -> set[str]:
    """Return the models that lend their output only, such as a teacher: no gradient, and in no optimizer."""
    trained = {_model_of(name) for name, optimized in seen.trainable.items() if optimized or name in seen.gradients}
    return {_model_of(name) for name in seen.trainable} - trained if trained else set()


def _model_of(parameter: str) -> str:
    return parameter.partition(".")[0]
