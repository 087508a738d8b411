"""Fine-tune the encoder of const.yaml in this process, and draw what it knows about the words.

python train.py
"""

import argparse
import pathlib

import torch
from model_def import ReviewTrial
from reviews import BLAME, LABELLED, LENGTH, NUMBERS, PRAISE

import det_lightning as det
from det_lightning.callbacks import DeterminedCheckpoint

HERE = pathlib.Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a tiny transformer that is pretrained on the spot.")
    parser.add_argument("--epochs", type=int, help="passes over the labelled reviews (default: const.yaml's)")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "output", help="directory for the results")
    return parser.parse_args()


@torch.no_grad()
def draw_words(trial: ReviewTrial, path: pathlib.Path) -> None:
    """Save a picture of how much each adjective speaks for praise, with those that had labels marked."""
    import matplotlib  # only needed for the picture

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trial.encoder.eval()
    review = "the soup was {0} and the bill was {0} and the table was {0}"
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for column, (name, kind) in enumerate({"praise": PRAISE, "blame": BLAME}.items()):
        rows = torch.tensor([[NUMBERS[word] for word in review.format(adjective).split()] for adjective in kind])
        assert rows.shape == (len(kind), LENGTH)
        shares = trial.predict(rows).softmax(dim=1)[:, 1].tolist()
        for row, (adjective, share) in enumerate(zip(kind, shares, strict=True)):
            weight = "bold" if row < LABELLED else "normal"
            axes.text(column + 0.02, -row, adjective, weight=weight, va="center", fontsize=9)
            axes.barh(-row, 0.55 * share, left=column + 0.33, color="tab:blue", height=0.7)
        axes.text(column + 0.02, 1, name, va="center", fontsize=10)
    axes.set_title("Predicted to be praise; adjectives with labelled reviews are bold", loc="left", fontsize=10)
    axes.set_xlim(0, 2)
    axes.set_ylim(-len(PRAISE), 1.6)
    axes.axis("off")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    max_length = None if arguments.epochs is None else det.pytorch.Epoch(arguments.epochs)

    checkpoints = DeterminedCheckpoint(
        output / "checkpoints", metric="accuracy", smaller_is_better=False, code_dir=HERE
    )
    with det.pytorch.init(exp_conf=HERE / "const.yaml", tensorboard_path=output / "runs") as context:
        trial = ReviewTrial(context)
        trainer = det.pytorch.Trainer(trial, context)
        trainer.fit(max_length=max_length, checkpoints=checkpoints)
    draw_words(trial, output / "words.png")
    print(f"Best checkpoint  {trainer.checkpoints.best_checkpoint_path}\nWords            {output / 'words.png'}")


if __name__ == "__main__":
    main()
