"""Does the trial train when several batches make one update?"""

from __future__ import annotations

from det_lightning.testing.checks.training import listed
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.training.runs import TrialRuns

__all__ = ["trains_under_aggregation"]


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
    if run.observer.batches < frequency:
        raise NotChecked(f"{run.observer.batches} batches close no update of {frequency}; see --trial-batches")
    before, moved_at = run.observer.initial, []
    for happening in run.observer.happenings:
        after = {name: value for (kind, name), value in happening.values.items() if kind == "weights"}
        before = run.observer.begun_with.get(happening.batches, before) if after else before
        moved = [name for name in run.observer.trainable if after and after[name] != before[name]]
        if moved and (happening.batches + 1) % frequency:
            raise CheckFailed(
                f"With aggregation_frequency={frequency} {happening.place} closes no update, and yet it moves "
                f"{listed(moved)}.",
                causes=["optimizer.step() in place of context.step_optimizer(optimizer)"],
            )
        moved_at += [happening.batches] * bool(moved)
        before = after or before
    if not moved_at:
        raise CheckFailed(
            f"With aggregation_frequency={frequency} no parameter moves in {run.observer.batches} batches.",
            causes=["context.step_optimizer() that is only called on some batches, by their index"],
        )
