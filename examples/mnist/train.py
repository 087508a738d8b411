"""Train the trial of const.yaml in this process, and draw what the network reads wrongly.

python train.py
python train.py --source /data/mnist
torchrun --standalone --nproc-per-node 2 train.py
"""

import argparse
import pathlib

import torch
from model_def import MnistTrial
from ruamel.yaml import YAML

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent
COLUMNS = 6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--source", help="'digits' or a directory with MNIST's four files (default: const.yaml's)")
    parser.add_argument("--epochs", type=int, help="passes over the training images (default: const.yaml's)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for the results")
    return parser.parse_args()


def read_configuration(source: str | None) -> dict:
    config = YAML(typ="safe").load(HERE / "const.yaml")
    if source is not None:
        config["data"]["source"] = source
    return config


@torch.no_grad()
def draw_mistakes(trial: MnistTrial, path: pathlib.Path) -> None:
    """Save a picture of the first validation images that are read wrongly, with what was read."""
    import matplotlib  # only needed for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images, labels = trial.validation_set.tensors
    trial.model.eval()
    found = trial.model(images).argmax(dim=1)
    wrong = (found != labels).nonzero().flatten().tolist()[: 2 * COLUMNS]
    figure, axes = pyplot.subplots(2, COLUMNS, figsize=(7.2, 3), layout="constrained")
    for place in axes.flat:
        place.axis("off")
    for place, index in zip(axes.flat, wrong, strict=False):
        place.imshow(images[index, 0], cmap="gray_r")
        place.set_title(f"{labels[index]}, read as {found[index]}", fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    max_length = None if arguments.epochs is None else det.pytorch.Epoch(arguments.epochs)

    checkpoints = DeterminedCheckpoint(output / "checkpoints", metric="validation_loss", code_dir=HERE)
    with det.pytorch.init(exp_conf=read_configuration(arguments.source), tensorboard_path=output / "runs") as context:
        trial = MnistTrial(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=max_length, checkpoints=checkpoints)

    if context.distributed.rank == 0:
        best = trainer.checkpoints.best_checkpoint_path
        assert best is not None
        draw_mistakes(det.pytorch.load_trial_from_checkpoint_path(best), output / "mistakes.png")
        print(f"Best checkpoint  {best}\nMistakes         {output / 'mistakes.png'}")


if __name__ == "__main__":
    main()
