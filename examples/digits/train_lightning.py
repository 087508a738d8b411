"""Train the same digits trial with Lightning's API, with the same numbers as train.py.

python examples/digits/train_lightning.py --epochs 20 --output digits
"""

import argparse
import pathlib

import pytorch_lightning as pl
import torch
from history import new_directory
from model_def import DigitsTrial
from pytorch_lightning.loggers import CSVLogger

from det_lightning.adapters import TrialModule
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent
HPARAMS = {"lr": 0.002, "lr_decay": 0.9, "dropout": 0.3, "global_batch_size": 32}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: 20)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for a new run-N")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    output = new_directory(arguments.output)
    checkpoints = DeterminedCheckpoint(output / "checkpoints", policy="best", metric="validation_loss", code_dir=HERE)
    torch.set_num_threads(1)  # more threads do not speed up a network this small
    pl.seed_everything(1)
    module = TrialModule(DigitsTrial, hparams=HPARAMS)
    logger = CSVLogger(output, name="csv")
    trainer = pl.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        callbacks=[checkpoints],
        logger=logger,
        log_every_n_steps=45,
        enable_checkpointing=False,
    )
    trainer.fit(module)

    assert isinstance(module.trial, DigitsTrial)
    history = module.trial.history
    history.draw(output / "curves.png")
    batches, loss, accuracy = history.best()
    print(f"""
Best validation  loss {loss:.4f}, accuracy {accuracy:.2%}, after {batches} batches
Checkpoint       {checkpoints.best_checkpoint_path}
Curves           {output / "curves.png"}
CSV              {logger.log_dir}""")


if __name__ == "__main__":
    main()
