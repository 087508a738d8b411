"""One of several processes that train a trial together; started by :mod:`det_lightning.testing.training.processes`.

python -m det_lightning.testing.training.ranks SETTINGS_FILE RANK
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from det_lightning.core.distributed import DistributedContext
from det_lightning.testing.observation.observer import Observer
from det_lightning.testing.training.execution import RunPlan, TrialSetup, train
from det_lightning.testing.training.shares import RankResult, without_chance
from det_lightning.testing.training.trial_source import ImportedTrial


def main(settings_file: Path, rank: int) -> None:
    """Train as one rank, and write what was seen beside the settings."""
    settings = json.loads(settings_file.read_text())
    folder, size = settings_file.parent, settings["size"]
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    distributed = DistributedContext(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        cross_rank=0,
        cross_size=1,
        pub_port=settings["port"],
        timeout_s=settings["timeout_s"],
    )
    setup = TrialSetup(ImportedTrial(settings["spec"], Path(settings["directory"])), **settings["setup"])
    run = train(
        setup,
        RunPlan(**settings["plan"]),
        f"rank {rank}",
        Observer(keeps_data=True),
        storage=folder / "checkpoints",
        distributed=distributed,
        around=without_chance,
    )
    (folder / f"rank-{rank}.pkl").write_bytes(pickle.dumps(RankResult.of(run)))
    if run.failure is not None:
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
