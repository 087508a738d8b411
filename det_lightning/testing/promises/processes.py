"""Do two processes that share out each batch train as one does?"""

from __future__ import annotations

from det_lightning.testing.evidence import Evidence
from det_lightning.testing.outcomes import BrokenPromise, UncheckedPromise
from det_lightning.testing.promises.training import listed
from det_lightning.testing.training.loading import ImportedTrial
from det_lightning.testing.training.processes import train_in_processes
from det_lightning.testing.training.running import RunPlan, train
from det_lightning.testing.training.shares import (
    RankResult,
    differing_loss,
    same_samples,
    unequal_ranks,
    without_chance,
    worst_parameter,
)
from det_lightning.testing.watching.observer import Observer

__all__ = ["two_agree_with_one"]

_BATCHES = 4


def two_agree_with_one(evidence: Evidence) -> None:
    """Both have the same weights after each update, and those of one process, but for rounding.

    Dropout and the statistics of batch norms are switched off for it. A trial that draws random numbers while it trains
    draws others in each process: then the weights of the processes are compared with each other only.
    """
    evidence.require(evidence.straight)
    _require_divisible_batch(evidence)
    plan = RunPlan(_BATCHES, validation_batches=2, aggregation_frequency=evidence.options.aggregation_frequency)
    ranks = _in_two_processes(evidence, plan)
    unequal = unequal_ranks(ranks)
    if unequal is not None:
        batch, names = unequal
        raise BrokenPromise(
            f"Two processes have different weights after batch {batch}: {listed(names)}.",
            causes=[
                "gradients that are not exchanged: loss.backward() in place of context.backward(loss)",
                "a forward pass through the bare model instead of what context.wrap_model() returned",
                "weights that the trial changes itself, differently in each process",
            ],
        )
    one = _in_one_process(evidence, plan)
    if "train_batch" in one.draws or "loader" in one.draws:
        return
    if same_samples(ranks, one):
        _require_agreement(ranks, one)
    elif evidence.probe[1].own_sharding:
        raise BrokenPromise(
            "Two processes together do not train on the samples that one does.",
            evidence.probe[1].process_groups,
            ["data that the trial shares out itself, and the training loop once more"],
        )


def _require_divisible_batch(evidence: Evidence) -> None:
    size = (evidence.setup.hparams or {}).get("global_batch_size")
    if isinstance(size, int) and size < 2:
        raise UncheckedPromise(f"global_batch_size is {size}, which two processes can not share")
    if not isinstance(evidence.setup.source, ImportedTrial):
        raise UncheckedPromise(f"{evidence.setup.source.name} is not given by the name of its module")


def _in_two_processes(evidence: Evidence, plan: RunPlan) -> list[RankResult]:
    source = evidence.setup.source
    assert isinstance(source, ImportedTrial)
    try:
        ranks = train_in_processes(evidence.setup, source, plan, evidence.storage("two").parent)
    except RuntimeError as e:
        raise BrokenPromise(f"With two processes the trial does not come to its end. {e}") from None
    if ranks[0].failure is not None:
        stage, text = ranks[0].failure
        if "training loader is empty" in text:
            raise UncheckedPromise("an epoch of this trial has too few batches to share them out to two processes")
        own_groups = evidence.probe[1].process_groups
        raise BrokenPromise(
            f"With two processes the trial fails {stage}:\n{text}",
            own_groups,
            ["process-group code of the trial's own, beside that of the context"] if own_groups else [],
        )
    return ranks


def _in_one_process(evidence: Evidence, plan: RunPlan) -> RankResult:
    observer = Observer(keeps_data=True)
    storage = evidence.storage("one")
    run = train(evidence.setup, plan, "one process", observer, storage=storage, around=without_chance)
    if run.failure is not None:
        raise evidence.explained(run)
    return RankResult.of(run)


def _require_agreement(ranks: list[RankResult], one: RankResult) -> None:
    loss, worst = differing_loss(ranks, one), worst_parameter(ranks[0], one)
    causes = [
        "a loss that is a sum over the batch, where it should be a mean",
        "a learning rate or loss that depends on the number of processes or on the batch size of one of them",
    ]
    if loss is not None:
        batch, name, two, single = loss
        raise BrokenPromise(
            f"Two processes do not train as one: metric {name!r} of batch {batch} is {two:.6g} on average in two, and "
            f"{single:.6g} in one, {abs(two - single):.3g} apart.",
            causes=causes,
        )
    if worst is not None:
        name, apart, moved = worst
        raise BrokenPromise(
            f"Two processes do not train as one: parameter {name!r} is {apart:.3g} apart after {len(one.metrics)} "
            f"batches, in which one process moved it by {moved:.3g}.",
            causes=causes,
        )
