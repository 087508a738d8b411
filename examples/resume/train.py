"""Train without interruption; train again with a stop and a resume; compare the weights bit by bit.

python examples/resume/train.py --length 200 --stop-after 77
"""

import argparse
import os
import pathlib
import sys
import tempfile

import torch
from model_def import TwoPartTrial

import det_lightning as det


def train(
    storage: str, length: int, seed: int, stop_after: int | None = None, latest_checkpoint: str | None = None
) -> TwoPartTrial:
    """Train a new trial to its length, or until it stops itself. Two batches make one optimizer update."""
    hparams = {"global_batch_size": 32}
    with det.pytorch.init(
        hparams=hparams, trial_seed=seed, aggregation_frequency=2, enable_tensorboard_logging=False
    ) as context:
        trial = TwoPartTrial(context, stop_after)
        det.pytorch.Trainer(trial, context, enable_progress_bar=False).fit(
            max_length=det.pytorch.Batch(length),
            validation_period=det.pytorch.Epoch(1),
            reporting_period=det.pytorch.Batch(1),
            checkpoint_policy="none",
            checkpoint_storage=storage,
            latest_checkpoint=latest_checkpoint,
        )
    return trial


def read_state(trial: TwoPartTrial) -> dict[str, torch.Tensor]:
    """Return all weights and all optimizer state of a trial by name."""
    state = {}
    for name in ("body", "head"):
        state |= {f"{name}.{key}": value for key, value in getattr(trial, name).state_dict().items()}
    for name in ("adam", "sgd"):
        for index, values in getattr(trial, name).state_dict()["state"].items():
            state |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description="Show that a stopped and resumed run ends bit-equal.")
    parser.add_argument("--length", type=int, default=200, help="length of the training in batches (default: 200)")
    parser.add_argument("--stop-after", type=int, default=77, help="where the second run stops (default: batch 77)")
    arguments = parser.parse_args()
    length, stop_after = arguments.length, arguments.stop_after
    if not 0 < stop_after < length:
        parser.error(f"--stop-after must lie between 0 and --length; got {stop_after} and {length}")
    os.chdir(pathlib.Path(__file__).parent)  # a checkpoint holds a copy of the working directory
    torch.set_num_threads(1)  # more threads do not speed up networks this small

    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as twice:
        straight = train(once, length, seed=1)
        train(twice, length, seed=1, stop_after=stop_after)
        (checkpoint,) = pathlib.Path(twice).iterdir()
        print(f"Stopped after {stop_after} of {length} batches; resuming from checkpoint {checkpoint.name}.")
        resumed = train(twice, length, seed=2, latest_checkpoint=checkpoint.name)  # resumed: seed unused

    expected, found = read_state(straight), read_state(resumed)
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    numbers = sum(value.numel() for value in expected.values())
    if different or expected.keys() != found.keys():
        sys.exit(f"NOT EQUAL: {', '.join(different) or 'other tensors'} differ from the run that never stopped.")
    print(f"Bit-equal: {numbers} weights and optimizer values in {len(expected)} tensors.")


if __name__ == "__main__":
    main()
