"""Does it train, the same way each time, by either API, and when several batches make one update?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from det_lightning.testing.causes import usual_causes
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.records.comparison import first_difference
from det_lightning.testing.records.difference import Difference
from det_lightning.testing.training.execution import Run
from det_lightning.testing.training.runs import TrialRuns


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names with commas between them; of many the first ones and how many there are."""
    every = list(names)
    first = ", ".join(every[:most])
    return first if len(every) <= most else f"{first}, ... ({len(every)} in all)"


def difference_of_runs(
    one: Run, other: Run, after: int | None = None, names: tuple[str, str] | None = None
) -> Difference | None:
    """Return the first thing in which two runs are not equal to the bit; None if they are.

    Args:
        one: a run.
        other: another one.
        after: ``other`` went on from the checkpoint of ``one`` after so many batches.
        names: what they are called in sentences, by default as in their plans.
    """
    start = "on_training_start" if after is None else "on_checkpoint_upload_end"
    difference = first_difference(one.record.since(start, after), other.record.since("on_training_start"))
    if difference is None:
        return None
    first, second = names or (one.plan.name, other.plan.name)
    return dataclasses.replace(difference, sides=(f"in {first}", f"in {second}"))


def trains(runs: TrialRuns) -> None:
    """It trains to the end, with losses that are numbers."""
    run = runs.straight
    if run.failure is not None and not run.failure.stage.startswith("in the validation"):
        raise runs.explained(run)
    for batch, metrics in enumerate(run.observer.metrics):
        for name, value in metrics.items():
            if "loss" in name.lower() and _is_not_finite(value):
                raise CheckFailed(
                    f"training metric {name!r} is {float(np.asarray(value)):g} at batch {batch}.",
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
    one = runs.require(runs.straight)
    if runs.again.failure is not None:
        raise runs.explained(runs.again)
    difference = difference_of_runs(one, runs.again)
    if difference is not None:
        raise CheckFailed(
            f"Two runs with seed {runs.options.seed} are not the same. {difference}",
            causes=usual_causes("seed", difference.kind),
        )


def moves_every_parameter(runs: TrialRuns) -> None:
    """Every parameter that wants a gradient gets one, is in an optimizer, and moves."""
    run = runs.require(runs.straight)
    seen = run.observer
    if not seen.trainable:
        raise CheckFailed("No parameter of the wrapped models is trainable: requires_grad is False for all of them.")
    trained = {_model_of(name) for name, optimized in seen.trainable.items() if optimized or name in seen.with_gradient}
    # A model that only lends its output, such as a teacher, gets no gradient and is in no optimizer.
    expected = [name for name in seen.trainable if not trained or _model_of(name) in trained]
    without = [name for name in expected if name not in seen.with_gradient]
    stray = [name for name in expected if name in seen.with_gradient and not seen.trainable[name]]
    (end,) = run.record.named("end")
    still = [
        name
        for name in expected
        if name not in (*without, *stray) and repr(end["weights"][name]) == repr(seen.weights_before[0][name])
    ]
    findings = [
        (without, "never get a gradient", "a layer that the loss does not use, or whose output is detached: leave it "
         "out, or freeze it with requires_grad_(False)"),
        (stray, "get a gradient, but no wrapped optimizer has them", "the optimizer is built from other "
         "parameters: pass it model.parameters() of what context.wrap_model() returned"),
        (still, "are in an optimizer and get a gradient, but do not move", "a gradient or learning rate of 0 "
         f"throughout the {runs.options.batches} batches (more with --trial-batches), step_optimizer() that is not "
         "called for that optimizer, or gradients that are cleared before the step"),
    ]  # fmt: skip
    broken = [(names, what, cause) for names, what, cause in findings if names]
    if broken:
        raise CheckFailed(
            f"Of {len(seen.trainable)} trainable parameters {sum(len(names) for names, _, _ in broken)} stay as they "
            f"were in {runs.options.batches} batches.",
            [f"{what}: {listed(names)}" for names, what, _ in broken],
            [cause for _, _, cause in broken],
        )


def _model_of(parameter: str) -> str:
    return parameter.partition(".")[0]


def trains_under_aggregation(runs: TrialRuns) -> None:
    """Weights move on the batches that close an update, on no others, and by the gradients of all its batches."""
    frequency = runs.aggregation_frequency
    runs.require(runs.straight)
    run = runs.aggregated
    if run.failure is not None:
        raise runs.explained(run)
    if runs.cleared_gradients:
        raise CheckFailed(
            f"With aggregation_frequency={frequency} the trial clears gradients that an update still needs:",
            runs.cleared_gradients,
            ["zero_grad() of a plain PyTorch loop that was kept: context.step_optimizer() clears the gradients itself"],
        )
    if run.record.batches < frequency:
        raise NotChecked(f"{run.record.batches} batches close no update of {frequency}; see --trial-batches")
    moved = dict(_moved_parameters(run))
    for batch, names in moved.items():
        if names and (batch + 1) % frequency:
            raise CheckFailed(
                f"With aggregation_frequency={frequency} batch {batch} closes no update, and yet it moves "
                f"{listed(names)}.",
                causes=["optimizer.step() in place of context.step_optimizer(optimizer)"],
            )
    if not any(moved.values()):
        raise CheckFailed(
            f"With aggregation_frequency={frequency} no parameter moves in {run.record.batches} batches.",
            causes=["context.step_optimizer() that is only called on some batches, by their index"],
        )


def _moved_parameters(run: Run) -> Iterator[tuple[int, list[str]]]:
    """Yield each batch, and the trainable parameters that it changes."""
    for before, event in zip(run.observer.weights_before, run.record.named("batch_end"), strict=True):
        after = event["weights"]
        yield event["batch"], [n for n in run.observer.trainable if repr(after[n]) != repr(before[n])]


def trains_equally(runs: TrialRuns) -> None:
    """``Trainer(trial, context).fit()`` and ``pl.Trainer().fit(TrialModule(...))`` give the same numbers."""
    straight = runs.require(runs.straight)
    lightning = runs.under_lightning
    if lightning.failure is not None:
        raise CheckFailed(
            f"Under pl.Trainer the trial fails {lightning.failure.description}",
            causes=["code that asks the context for what only a script with init() gives it"],
        )
    difference = difference_of_runs(straight, lightning)
    if difference is not None:
        raise CheckFailed(
            f"The two APIs do not train the same. {difference}",
            causes=[
                "random draws when the module is imported or the class is made, before the seed is set",
                "state in globals or on the class that the first run left behind",
            ],
        )
