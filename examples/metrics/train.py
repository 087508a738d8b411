"""Train the trial of const.yaml in this process, and draw the scores of the healthy and the ill.

python train.py
torchrun --standalone --nproc-per-node 2 train.py
"""

import argparse
import pathlib

import torch
from model_def import TumourTrial

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network, with metrics of several kinds.")
    parser.add_argument("--epochs", type=int, help="passes over the training cases (default: const.yaml's)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for the results")
    return parser.parse_args()


@torch.no_grad()
def draw_scores(trial: TumourTrial, path: pathlib.Path) -> None:
    """Save a picture of how the scores of validation cases are spread, with the threshold."""
    import matplotlib  # only needed for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measurements, is_malignant = trial.validation_set.tensors
    trial.model.eval()
    scores = trial.model(measurements).squeeze(1).sigmoid()
    reducer = trial.sensitivity
    reducer.reset()
    reducer.update(scores, is_malignant)
    metrics = reducer.cross_slot_reduce([reducer.per_slot_reduce()])
    figure, axes = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
    bins = [n / 25 for n in range(26)]
    groups = [scores[is_malignant == 0].tolist(), scores[is_malignant == 1].tolist()]
    axes.hist(groups, bins=bins, stacked=True, label=["benign", "malignant"])
    axes.axvline(metrics["threshold"], color="black", linestyle="--", label="threshold")
    axes.set_title(f"Found above the threshold: {metrics['sensitivity']:.0%} of the malignant", loc="left", fontsize=10)
    axes.set_xlabel("score")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    max_length = None if arguments.epochs is None else det.pytorch.Epoch(arguments.epochs)

    checkpoints = DeterminedCheckpoint(
        output / "checkpoints", metric="sensitivity", smaller_is_better=False, code_dir=HERE
    )
    with det.pytorch.init(exp_conf=HERE / "const.yaml", tensorboard_path=output / "runs") as context:
        trial = TumourTrial(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=max_length, checkpoints=checkpoints)

    if context.distributed.rank == 0:
        best = trainer.checkpoints.best_checkpoint_path
        assert best is not None
        draw_scores(det.pytorch.load_trial_from_checkpoint_path(best), output / "scores.png")
        print(f"Best checkpoint  {best}\nScores           {output / 'scores.png'}")


if __name__ == "__main__":
    main()
