"""apex levels with Horovod: the scenarios of ``tests.precision.precision_ranks``, each writing what it ended with.

python -m det_lightning.launch.horovod -np 2 -- python -m tests.distributed.horovod.levels OUTPUT 2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from det_lightning import errors, pytorch
from tests.distributed.trials import GLOBAL_BATCH
from tests.precision.precision_ranks import SCENARIOS, Leveled, outcome_of
from tests.trials import seed_everything

LEVELS = ("O1", "O2", "O2-aggregated")


def train(name: str, output: Path, size: int = 2) -> None:
    _, level, frequency = SCENARIOS[name]
    seed_everything()
    hparams = {"global_batch_size": GLOBAL_BATCH}
    with pytorch.init(hparams=hparams, enable_tensorboard_logging=False, aggregation_frequency=frequency) as context:
        assert context.distributed.size == size
        trial = Leveled(context, level)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        storage = output / f"{name}-storage-{size}"
        trainer.fit(max_length=pytorch.Batch(12), checkpoint_policy="none", checkpoint_storage=storage)
        torch.save(outcome_of(trial), output / f"{name}-{size}-{context.distributed.rank}.pt")


def main(output: Path, size: int) -> None:
    for name in LEVELS:
        train(name, output, size)
    if size > 1:
        try:
            train("O3", output)
        except errors.InvalidExperimentException as e:
            assert "Horovod knows the parameters" in str(e), e
        else:
            raise AssertionError("O3 was not refused")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
