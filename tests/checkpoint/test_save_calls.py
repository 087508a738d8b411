"""The number of Python calls and files of det_lightning that a save and a resume execute, independent of any clock."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from det_lightning import pytorch
from det_lightning.callbacks import DeterminedCheckpoint
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.engine.checkpointing import RunCheckpoints
from tests.engine.test_batch_calls import PlainTrial, profiled

ROOT = Path(__file__).resolve().parent.parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("det_lightning", "adapters", "callbacks"))

# Of a save, and of a resume up to the first batch. Python before 3.12 counts each comprehension as a call.
MOST_CALLS = 90
MOST_FILES = 16
MOST_FILES_OF_A_RESUME = 79


class SaveRecorder:
    """Records the code that each save executes, and the files that are executed before the first batch."""

    def __init__(self) -> None:
        self.saves: list[list[CodeType]] = []
        self.files_before_training: set[str] = set()
        self._save: FrameType | None = None
        self._trains = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and frame is self._save:
            self._save = None
        if event != "call":
            return
        if code is RunCheckpoints.save.__code__:
            self._save = frame
            self.saves.append([])
        self._trains = self._trains or code is PlainTrial.train_batch.__code__
        if code.co_filename.startswith(OURS):
            if self._save is not None:
                self.saves[-1].append(code)
            if not self._trains:
                self.files_before_training.add(code.co_filename)


def train(directory: Path, batches: int, latest: str | None = None) -> SaveRecorder:
    """Train with a checkpoint every four batches and a code directory of one file."""
    code = directory / "code"
    code.mkdir(exist_ok=True)
    (code / "model.py").write_text("LAYERS = 1\n")
    recorder = SaveRecorder()
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(PlainTrial(context), context, enable_progress_bar=False)
        length, period = pytorch.Batch(batches), pytorch.Batch(4)
        checkpoints = DeterminedCheckpoint(directory / "checkpoints", policy="none", period=period, code_dir=code)
        profiled(recorder, lambda: trainer.fit(max_length=length, checkpoints=checkpoints, latest_checkpoint=latest))
    return recorder


def test_save_and_resume_execute_little(tmp_path: Path) -> None:
    _, calls = train(tmp_path, 8).saves
    names = [(Path(code.co_filename).name, code.co_name) for code in calls]
    assert len(calls) <= MOST_CALLS, names
    assert len({code.co_filename for code in calls}) <= MOST_FILES, names
    newest = CheckpointStorage(tmp_path / "checkpoints").newest()
    assert newest is not None
    load_checkpoint(newest)  # imports what only reading needs, which would execute files too
    files = train(tmp_path, 12, newest).files_before_training
    assert len(files) <= MOST_FILES_OF_A_RESUME, sorted(files)
