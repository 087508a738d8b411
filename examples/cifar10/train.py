"""Train the trial of const.yaml in this process, and draw images with the classes that the network gives them.

python train.py
python train.py --source /data/cifar-10-batches-bin
torchrun --standalone --nproc-per-node 2 train.py
"""

import argparse
import io
import pathlib

import torch
from model_def import CifarTrial, scale
from PIL import Image
from ruamel.yaml import YAML

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent
ROWS = 2
COLORS = 48  # of the picture's file, which noise would make large otherwise


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small residual network on colour images of ten classes.")
    parser.add_argument("--source", help="'made' or the directory of CIFAR-10 (default: const.yaml's)")
    parser.add_argument("--epochs", type=int, help="passes over the training images (default: const.yaml's)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for the results")
    return parser.parse_args()


def read_configuration(source: str | None) -> dict:
    config = YAML(typ="safe").load(HERE / "const.yaml")
    if source is not None:
        config["data"]["source"] = source
    return config


@torch.no_grad()
def draw_classes(trial: CifarTrial, path: pathlib.Path) -> None:
    """Save a picture of the first validation images, each with its class, in red if the network gives another one."""
    import matplotlib  # only needed for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = trial.class_names
    images, labels = (tensor[: ROWS * len(names)] for tensor in trial.validation_set.tensors)
    trial.model.eval()
    found = trial.model(scale(images)).argmax(dim=1)
    figure, axes = pyplot.subplots(ROWS, len(names), figsize=(9, 1.05 * ROWS), layout="constrained")
    for place, image, label, guess in zip(axes.flat, images, labels, found, strict=True):
        place.axis("off")
        place.imshow(image.permute(1, 2, 0), interpolation="nearest")
        place.set_title(names[guess], fontsize=8, color="black" if guess == label else "red")
    content = io.BytesIO()
    figure.savefig(content, dpi=72)
    pyplot.close(figure)
    Image.open(content).convert("RGB").quantize(COLORS).save(path, optimize=True)


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    max_length = None if arguments.epochs is None else det.pytorch.Epoch(arguments.epochs)

    checkpoints = DeterminedCheckpoint(
        output / "checkpoints", metric="accuracy", smaller_is_better=False, code_dir=HERE
    )
    with det.pytorch.init(exp_conf=read_configuration(arguments.source), tensorboard_path=output / "runs") as context:
        trial = CifarTrial(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=max_length, checkpoints=checkpoints)

    if context.distributed.rank == 0:
        best = trainer.checkpoints.best_checkpoint_path
        assert best is not None
        draw_classes(det.pytorch.load_trial_from_checkpoint_path(best), output / "classes.png")
        print(f"Best checkpoint  {best}\nClasses          {output / 'classes.png'}")


if __name__ == "__main__":
    main()
