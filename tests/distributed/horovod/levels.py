"""apex levels with Horovod: the scenarios of ``tests.precision.precision_ranks``, each writing what it ended with.

python -m det_lightning.launch.horovod -np 2 -- python -m tests.distributed.horovod.levels OUTPUT 2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from det_lightning import errors
from tests.precision.precision_ranks import SCENARIOS, outcome_of, train

LEVELS = ("O1", "O2", "O2-aggregated")


def main(output: Path, size: int) -> None:
    for name in LEVELS:
        _, level, frequency = SCENARIOS[name]
        trial = train(None, level, frequency, output / f"{name}-storage-{size}")
        assert trial.context.distributed.size == size
        torch.save(outcome_of(trial), output / f"{name}-{size}-{trial.context.distributed.rank}.pt")
    if size > 1:
        try:
            train(None, SCENARIOS["O3"][1], 1, output / "O3-storage")
        except errors.InvalidExperimentException as e:
            assert "Horovod knows the parameters" in str(e), e
        else:
            raise AssertionError("O3 was not refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
