"""Train the trial of const.yaml in this process, and draw what the detector finds.

python train.py
python train.py --source /data/coco --size 320
torchrun --standalone --nproc-per-node 2 train.py
"""

import argparse
import io
import pathlib

import torch
from model_def import DetectionTrial
from PIL import Image
from ruamel.yaml import YAML

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent
COLUMNS = 5
LEAST_SCORE = 0.5
COLORS = 48  # of the picture's file, which noise would make large otherwise


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a detector of two stages.")
    parser.add_argument("--source", help="'made' or the directory of COCO (default: const.yaml's)")
    parser.add_argument("--size", type=int, help="height and width of the images (default: const.yaml's)")
    parser.add_argument("--epochs", type=int, help="passes over the training images (default: const.yaml's)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for the results")
    return parser.parse_args()


def read_configuration(source: str | None, size: int | None) -> dict:
    config = YAML(typ="safe").load(HERE / "const.yaml")
    given = {"source": source, "size": size}
    config["data"].update({key: value for key, value in given.items() if value is not None})
    return config


@torch.no_grad()
def draw_detections(trial: DetectionTrial, path: pathlib.Path) -> None:
    """Save a picture of the first validation images with the boxes found in them."""
    import matplotlib  # only needed for the picture

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    images = torch.stack([trial.validation_set[index][0] for index in range(2 * COLUMNS)])
    trial.model.eval()
    figure, axes = pyplot.subplots(2, COLUMNS, figsize=(8, 3.3), layout="constrained")
    for place, image, found in zip(axes.flat, images, trial.model(images), strict=True):
        place.axis("off")
        place.imshow(image.permute(1, 2, 0))
        for (left, top, right, bottom), number, score in zip(*(part.tolist() for part in found), strict=True):
            if score >= LEAST_SCORE:
                box = patches.Rectangle((left, top), right - left, bottom - top, fill=False, color="black")
                place.add_patch(box)
                name = f"{trial.class_names[number - 1]} {score:.0%}"
                place.text(left, top - 1, name, fontsize=6, backgroundcolor=(1, 1, 1, 0.6))
    content = io.BytesIO()
    figure.savefig(content, dpi=72)
    pyplot.close(figure)
    Image.open(content).convert("RGB").quantize(COLORS).save(path, optimize=True)


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    max_length = None if arguments.epochs is None else det.pytorch.Epoch(arguments.epochs)

    config = read_configuration(arguments.source, arguments.size)
    checkpoints = DeterminedCheckpoint(
        output / "checkpoints", metric="average_precision", smaller_is_better=False, code_dir=HERE
    )
    with det.pytorch.init(exp_conf=config, tensorboard_path=output / "runs") as context:
        trial = DetectionTrial(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=max_length, checkpoints=checkpoints)

    if context.distributed.rank == 0:
        best = trainer.checkpoints.best_checkpoint_path
        assert best is not None
        draw_detections(det.pytorch.load_trial_from_checkpoint_path(best), output / "detections.png")
        print(f"Best checkpoint  {best}\nDetections       {output / 'detections.png'}")


if __name__ == "__main__":
    main()
