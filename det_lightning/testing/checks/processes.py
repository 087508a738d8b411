"""Do two processes that share out each batch train as one does?"""

from __future__ import annotations

from det_lightning.testing.checks.training import listed
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.outcomes import CheckFailed, NotChecked
from det_lightning.testing.training.execution import RunPlan, train
from det_lightning.testing.training.processes import train_in_processes
from det_lightning.testing.training.runs import TrialRuns
from det_lightning.testing.training.shares import (
    RankResult,
    differing_loss,
    same_samples,
    unequal_ranks,
    without_chance,
    worst_parameter,
)
from det_lightning.testing.training.trial_source import ImportedTrial

__all__ = ["two_agree_with_one"]

_BATCHES = 4


def two_agree_with_one(runs: TrialRuns) -> None:
    """Both have the same weights after each update, and those of one process, but for rounding.

    Dropout and the statistics of batch norms are switched off for it. A trial that draws random numbers while it trains
    draws others in each process: then the weights of the processes are compared with each other only.
    """
    runs.require(runs.straight)
    _require_divisible_batch(runs)
    plan = RunPlan(_BATCHES, validation_batches=2, aggregation_frequency=runs.options.aggregation_frequency)
    ranks = _in_two_processes(runs, plan)
    unequal = unequal_ranks(ranks)
    if unequal is not None:
        batch, names = unequal
        raise CheckFailed(
            f"Two processes have different weights after batch {batch}: {listed(names)}.",
            causes=[
                "gradients that are not exchanged: loss.backward() in place of context.backward(loss)",
                "a forward pass through the bare model instead of what context.wrap_model() returned",
                "weights that the trial changes itself, differently in each process",
            ],
        )
    one = _in_one_process(runs, plan)
    if "train_batch" in one.draws or "loader" in one.draws:
        return
    if same_samples(ranks, one):
        _require_agreement(ranks, one)
    elif runs.probe[1].own_sharding:
        raise CheckFailed(
            "Two processes together do not train on the samples that one does.",
            runs.probe[1].process_groups,
            ["data that the trial shares out itself, and the training loop once more"],
        )


def _require_divisible_batch(runs: TrialRuns) -> None:
    size = (runs.setup.hparams or {}).get("global_batch_size")
    if isinstance(size, int) and size < 2:
        raise NotChecked(f"global_batch_size is {size}, which two processes can not share")
    if not isinstance(runs.setup.source, ImportedTrial):
        raise NotChecked(f"{runs.setup.source.name} is not given by the name of its module")


def _in_two_processes(runs: TrialRuns, plan: RunPlan) -> list[RankResult]:
    source = runs.setup.source
    assert isinstance(source, ImportedTrial)
    try:
        ranks = train_in_processes(runs.setup, source, plan, runs.storage("two").parent)
    except RuntimeError as e:
        raise CheckFailed(f"With two processes the trial does not come to its end. {e}") from None
    if ranks[0].failure is not None:
        stage, text = ranks[0].failure
        if "training loader is empty" in text:
            raise NotChecked("an epoch of this trial has too few batches to share them out to two processes")
        own_groups = runs.probe[1].process_groups
        raise CheckFailed(
            f"With two processes the trial fails {stage}:\n{text}",
            own_groups,
            ["process-group code of the trial's own, beside that of the context"] if own_groups else [],
        )
    return ranks


def _in_one_process(runs: TrialRuns, plan: RunPlan) -> RankResult:
    observer = Observer(keeps_data=True)
    storage = runs.storage("one")
    run = train(runs.setup, plan, "one process", observer, storage=storage, around=without_chance)
    if run.failure is not None:
        raise runs.explained(run)
    return RankResult.of(run)


def _require_agreement(ranks: list[RankResult], one: RankResult) -> None:
    loss, worst = differing_loss(ranks, one), worst_parameter(ranks[0], one)
    causes = [
        "a loss that is a sum over the batch, where it should be a mean",
        "a learning rate or loss that depends on the number of processes or on the batch size of one of them",
    ]
    if loss is not None:
        batch, name, two, single = loss
        raise CheckFailed(
            f"Two processes do not train as one: metric {name!r} of batch {batch} is {two:.6g} on average in two, and "
            f"{single:.6g} in one, {abs(two - single):.3g} apart.",
            causes=causes,
        )
    if worst is not None:
        name, apart, moved = worst
        raise CheckFailed(
            f"Two processes do not train as one: parameter {name!r} is {apart:.3g} apart after {len(one.metrics)} "
            f"batches, in which one process moved it by {moved:.3g}.",
            causes=causes,
        )
