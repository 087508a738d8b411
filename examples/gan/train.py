"""Train two models against each other, in a few seconds on one core.

python examples/gan/train.py --batches 1000
python examples/gan/train.py --picture points.png
"""

import argparse
import os
import pathlib
import tempfile

import torch
from model_def import RingGANTrial, energy_distance, sample_ring

import det_lightning as det


@torch.no_grad()
def draw_points(trial: RingGANTrial, path: pathlib.Path) -> None:
    """Save a picture of as many generated points as real ones."""
    import matplotlib  # only needed for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    torch.manual_seed(0)
    figure, axes = pyplot.subplots(1, 2, figsize=(6, 3), sharex=True, sharey=True, layout="constrained")
    for place, title, points in zip(
        axes, ("real", "generated"), (sample_ring(1000, seed=1), trial.generate(1000).cpu()), strict=True
    ):
        place.scatter(points[:, 0], points[:, 1], s=1)
        place.set_title(title, loc="left")
        place.set_aspect("equal")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on points of a ring of eight clusters.")
    parser.add_argument("--batches", type=int, default=1000, help="length of the training (default: 1000)")
    parser.add_argument("--picture", type=pathlib.Path, help="file for a picture of the points; needs matplotlib")
    arguments = parser.parse_args()
    picture = arguments.picture and arguments.picture.resolve()
    os.chdir(pathlib.Path(__file__).parent)  # a checkpoint holds a copy of the working directory
    torch.set_num_threads(1)  # more threads do not speed up networks this small

    hparams = {"lr": 0.0005, "global_batch_size": 256}
    with (
        tempfile.TemporaryDirectory() as checkpoints,
        det.pytorch.init(hparams=hparams, trial_seed=1, enable_tensorboard_logging=False) as context,
    ):
        trial = RingGANTrial(context)
        det.pytorch.Trainer(trial, context).fit(
            max_length=det.pytorch.Batch(arguments.batches),
            validation_period=det.pytorch.Epoch(1),
            step_zero_validation=True,
            checkpoint_policy="none",
            checkpoint_storage=checkpoints,
        )

    before, *_, after = trial.distances.values
    at_best = energy_distance(sample_ring(2000, seed=2), sample_ring(2000, seed=1)).item()
    print("\nEnergy distance between generated and real points")
    print(f"    before training    {before:.4f}")
    print(f"    after training     {after:.4f}")
    print(f"    at best            {at_best:.4f}  (real points against other real points)")
    if picture:
        draw_points(trial, picture)


if __name__ == "__main__":
    main()
