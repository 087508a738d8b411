"""A trial whose callback keeps an object, and which fails once; before that it may forge its own checkpoint."""

# mypy: ignore-errors

import json
import os
import pathlib

import torch
from determined import pytorch
from linear_trial import LinearTrial


class Meter:
    """A type that no checkpoint is read with, unless it is trusted."""

    def __init__(self) -> None:
        self.batches = 0


class Forged:
    """What somebody else put there."""

    def __reduce__(self):
        return os.system, ("touch code-was-run",)


class Keeper(pytorch.PyTorchCallback):
    def __init__(self) -> None:
        self.meter = Meter()

    def on_checkpoint_save_start(self, checkpoint) -> None:
        self.meter.batches += 1

    def state_dict(self):
        return {"meter": self.meter}

    def load_state_dict(self, state_dict) -> None:
        self.meter = state_dict["meter"]
        print("resumed with the meter at", self.meter.batches)


class KeepingTrial(LinearTrial):
    def build_callbacks(self):
        return {"keeper": Keeper()}

    def train_batch(self, batch, epoch_idx, batch_idx):
        mark = pathlib.Path("../failed")
        if batch_idx == 6 and not mark.exists():
            mark.touch()
            if self.context.get_hparam("forges"):
                self.forge()
            raise ValueError("it fails once")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def forge(self) -> None:
        (checkpoint,) = pathlib.Path("../../../checkpoints").glob("[!.]*")
        file = checkpoint / "state_dict.pth"
        torch.save({**torch.load(file, weights_only=False), "more": Forged()}, file)
        entries = json.loads((checkpoint / "metadata.json").read_text())
        entries = {name: value for name, value in entries.items() if name not in ("files", "metadata_crc32c")}
        (checkpoint / "metadata.json").write_text(json.dumps(entries))
