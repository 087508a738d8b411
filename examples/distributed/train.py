"""Train the trial of const.yaml in as many processes as torchrun starts, and compare their weights.

torchrun --standalone --nproc-per-node 2 train.py
python train.py
"""

import argparse
import pathlib

from model_def import WaveTrial

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one network in several processes.")
    parser.add_argument("--epochs", type=int, help="passes over the training waves (default: const.yaml's)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for the results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    max_length = None if arguments.epochs is None else det.pytorch.Epoch(arguments.epochs)

    checkpoints = DeterminedCheckpoint(output / "checkpoints", metric="validation_loss", code_dir=HERE)
    with det.pytorch.init(exp_conf=HERE / "const.yaml", tensorboard_path=output / "runs") as context:
        trial = WaveTrial(context)
        det.pytorch.Trainer(trial, context).fit(max_length=max_length, checkpoints=checkpoints)
        digests = context.distributed.allgather(trial.weights_digest())

    if context.distributed.rank == 0:
        for rank, digest in enumerate(digests):
            print(f"Weights of rank {rank}  {digest}")


if __name__ == "__main__":
    main()
