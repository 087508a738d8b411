"""What can be compared between a run of one process and one of several, which share out each batch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from det_lightning.testing.observation.patching import replaced
from det_lightning.testing.training.execution import ObservedRun

__all__ = ["RankResult", "differing_loss", "same_samples", "unequal_ranks", "without_chance", "worst_parameter"]

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# Sums in another order, and means of means over uneven parts, are far below this; a sum in place of a mean is not.
_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one process saw.

    Attributes:
        metrics: of each batch, of this process only; the numbers among them.
        digests: of the parameters after each batch, by name.
        data: the arrays of each batch.
        draws: where random numbers were drawn.
        initial, final: the parameters before and after.
        failure: stage and text of what ended the run.
    """

    metrics: list[dict[str, float]]
    digests: list[dict[str, str]]
    data: list[list[Any]]
    draws: set[str]
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    failure: tuple[str, str] | None

    @classmethod
    def of(cls, run: ObservedRun) -> RankResult:
        """Return what was seen in ``run``."""
        seen, final = run.observer, run.final.get("weights", {})
        batches = [happening.values for happening in seen.happenings if happening.what == "batch"]
        return cls(
            metrics=[_numbers(batch) for batch in batches],
            digests=[
                {
                    name: value.digest
                    for (kind, name), value in batch.items()
                    if kind == "weights" and name in seen.trainable
                }
                for batch in batches
            ],
            data=seen.data,
            draws=seen.draws,
            initial=seen.start_weights,
            final={name: final[name] for name in seen.start_weights if name in final},
            failure=None if run.failure is None else (run.failure.stage, run.failure.text),
        )


def _numbers(batch: Mapping[tuple[str, str], Any]) -> dict[str, float]:
    return {
        name: float(value)
        for (kind, name), value in batch.items()
        if kind == "metric" and isinstance(value, int | float | np.ndarray | np.generic) and np.ndim(value) == 0
    }


@contextlib.contextmanager
def without_chance() -> Iterator[None]:
    """Switch off dropout, and take running statistics in batch norms: both differ by how a batch is shared out."""

    def as_it_is(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inputs

    attention, batch_norm = functional.scaled_dot_product_attention, functional.batch_norm

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def with_running_statistics(
        inputs: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        own = training and running_mean is None
        return batch_norm(inputs, running_mean, running_var, weight, bias, own, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(replaced(functional, name, as_it_is))
        stack.enter_context(replaced(functional, "scaled_dot_product_attention", without_dropout))
        stack.enter_context(replaced(functional, "batch_norm", with_running_statistics))
        yield


def unequal_ranks(ranks: Sequence[RankResult]) -> tuple[int, list[str]] | None:
    """Return the first batch after which ranks have other weights than the first one, and which; None if none."""
    for index, batches in enumerate(zip(*(rank.digests for rank in ranks), strict=False)):
        names = [name for name in batches[0] if any(batch.get(name) != batches[0][name] for batch in batches)]
        if names:
            return index, names
    return None


def same_samples(ranks: Sequence[RankResult], one: RankResult) -> bool:
    """Tell whether the ranks together have in their first batch the samples of one process, in any order."""
    if not one.data or not all(rank.data for rank in ranks):
        return False
    together: collections.Counter[bytes] = collections.Counter()
    for rank in ranks:
        together += _samples(rank.data[0])
    return together == _samples(one.data[0])


def _samples(arrays: Sequence[np.ndarray[Any, Any]]) -> collections.Counter[bytes]:
    """Return the rows of all arrays of a batch."""
    return collections.Counter(row.tobytes() for array in arrays for row in array)


def differing_loss(ranks: Sequence[RankResult], one: RankResult) -> tuple[int, str, float, float] | None:
    """Return batch, name and both values of the first loss that the ranks do not have, on average, in common."""
    for index, metrics in enumerate(one.metrics):
        for name, value in metrics.items():
            if "loss" not in name.lower():
                continue
            mean = float(np.mean([rank.metrics[index].get(name, np.nan) for rank in ranks]))
            if not abs(mean - value) <= _SHARE * max(abs(mean), abs(value)) + 1e-4:
                return index, name, mean, value
    return None


def worst_parameter(two: RankResult, one: RankResult) -> tuple[str, float, float] | None:
    """Return the parameter that differs most, and by how much, where the training as a whole differs; else None.

    Distances are shares of how far the training of one process moved the parameters.
    """
    apart = {name: float((two.final[name].double() - one.final[name].double()).norm()) for name in one.final}
    moved = {name: float((one.final[name].double() - one.initial[name].double()).norm()) for name in one.final}
    of_all = np.linalg.norm(list(apart.values())) / max(float(np.linalg.norm(list(moved.values()))), 1e-12)
    if not apart or of_all <= _SHARE:
        return None
    worst = max(apart, key=lambda name: apart[name])
    return worst, apart[worst], moved[worst]
