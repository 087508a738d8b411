"""Creates trials: their ids, seeds and hyperparameters."""

from __future__ import annotations

from typing import Any

from det_lightning.experiments.search.generator import Generator
from det_lightning.experiments.search.operations import CreateTrial
from det_lightning.experiments.search.space import SearchSpace, draw
from det_lightning.hyperparameters import convert_like_master

#: More trials than this are never created at once, whatever a search may have. Each of them is the same trial later.
MOST_AT_ONCE = 100_000


class TrialFactory:
    """Creates the trials of one search, all from one generator: trial k is the same whenever it is created."""

    def __init__(self, space: SearchSpace, experiment_seed: int) -> None:
        self._space = space
        self._generator = Generator(experiment_seed)
        self.created = 0

    def drawn(self, validate_at: tuple[int, ...] = ()) -> CreateTrial:
        return self.with_hparams(draw(self._space, self._generator), validate_at)

    def with_hparams(self, hparams: dict[str, Any], validate_at: tuple[int, ...] = ()) -> CreateTrial:
        for _ in range(4):
            self._generator.word()  # Determined draws 16 bytes for the id of its request
        self.created += 1
        return CreateTrial(self.created, self._generator.below(2**31), convert_like_master(hparams), validate_at)


def most_replaced(max_trials: int) -> int:
    """Return how many trials with invalid hyperparameters are replaced, so that a search without valid ones ends."""
    return max(100, 10 * max_trials)
