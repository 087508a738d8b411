"""Train a trial with Ray Train: ``python docs/cluster/ray_train.py --workers 4 --gpu --storage /shared/checkpoints``.

Needs ``pip install "ray[train]"``, and model_def.py with MyTrial where the workers can import it.
"""

from __future__ import annotations

import argparse
from typing import Any

import det_lightning as det
from det_lightning.callbacks import PreemptionHandler


def train_on_worker(config: dict[str, Any]) -> None:
    """Train on one worker. Ray has already connected the workers with torch.distributed."""
    from model_def import MyTrial
    from ray import train

    worker = train.get_context()
    distributed = det.core.DistributedContext(
        rank=worker.get_world_rank(),
        size=worker.get_world_size(),
        local_rank=worker.get_local_rank(),
        local_size=worker.get_local_world_size(),
        cross_rank=worker.get_node_rank(),
        cross_size=config["nodes"],
        chief_ip=config["chief_ip"],
    )
    with det.pytorch.init(hparams=config["hparams"], distributed=distributed) as context:
        # Ray runs this in a thread, where signals cannot be handled. It restarts lost workers, and the run resumes
        # from the newest checkpoint.
        trainer = det.pytorch.Trainer(MyTrial(context), context, callbacks=[PreemptionHandler(signals=[])])
        trainer.fit(
            max_length=det.pytorch.Epoch(config["epochs"]),
            checkpoint_period=det.pytorch.Epoch(1),
            checkpoint_storage=config["storage"],
            latest_checkpoint="last",
        )


def main() -> None:
    """Start the workers, on one node by default."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes that the workers run on")
    parser.add_argument("--chief-ip", help="address of the first worker's node; needed with several nodes")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", required=True, help="a directory or URL that every worker reaches")
    options = parser.parse_args()
    config = {
        "hparams": {"global_batch_size": 64, "lr": 0.001},
        "epochs": options.epochs,
        "storage": options.storage,
        "nodes": options.nodes,
        "chief_ip": options.chief_ip,
    }
    TorchTrainer(
        train_on_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
