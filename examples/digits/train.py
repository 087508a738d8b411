"""Train the digits trial with Determined's API, in less than half a minute on two cores.

python examples/digits/train.py --epochs 20 --output digits
torchrun --nproc-per-node 2 examples/digits/train.py
"""

import argparse
import pathlib

import torch
from history import new_directory
from model_def import DigitsTrial, accuracy

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent
HPARAMS = {"lr": 0.002, "lr_decay": 0.9, "dropout": 0.3, "global_batch_size": 32}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for a new run-N")
    return parser.parse_args()


def measure_accuracy(trial: DigitsTrial) -> float:
    """Return the share of validation images that a loaded trial classifies correctly."""
    images, labels = trial.validation_set.tensors
    trial.model.eval()
    with torch.no_grad():
        return accuracy(trial.model(images), labels).item()


def main() -> None:
    arguments = parse_arguments()
    # Before init(), where ranks wait for each other: none has made the directory yet.
    output = new_directory(arguments.output.resolve())
    picture = output / "curves.png"
    torch.set_num_threads(1)  # more threads do not speed up a network this small

    # A checkpoint holds a copy of the code.
    checkpoints = DeterminedCheckpoint(output / "checkpoints", policy="best", metric="validation_loss", code_dir=HERE)
    with det.pytorch.init(hparams=HPARAMS, trial_seed=1, tensorboard_path=output / "runs") as context:
        trial = DigitsTrial(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(
            max_length=det.pytorch.Epoch(arguments.epochs),
            validation_period=det.pytorch.Epoch(1),
            checkpoints=checkpoints,
        )

    if context.distributed.rank > 0:  # all ranks have the same results
        return
    trial.history.draw(picture)
    batches, loss, best_accuracy = trial.history.best()
    best_checkpoint = trainer.checkpoints.best_checkpoint_path
    assert best_checkpoint is not None
    loaded = det.pytorch.load_trial_from_checkpoint_path(best_checkpoint)
    print(f"""
Best validation  loss {loss:.4f}, accuracy {best_accuracy:.2%}, after {batches} batches
Loaded again     accuracy {measure_accuracy(loaded):.2%}
Checkpoint       {best_checkpoint}
Curves           {picture}
TensorBoard      tensorboard --logdir {context.get_tensorboard_path()}""")


if __name__ == "__main__":
    main()
