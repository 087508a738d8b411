"""The TensorBoard files of a run, read back as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from det_lightning.core._reports import select_scalars
from det_lightning.core._task import default_directory
from det_lightning.core._tensorboard import EventFile, TensorBoardOutput

Scalars = list[tuple[str, float, int]]
SCALARS: Scalars = [("Determined/loss", 1.5, 1), ("Determined/loss", 0.5, 2), ("Determined/val_loss", 2.5, 2)]


def read(directory: Path) -> Scalars:
    """Return the scalars of all files in ``directory``, by tag and then in the order in which they were written."""
    found: Scalars = []
    for file in sorted(directory.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        found += [(tag, e.value, e.step) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    return found


def test_what_is_written_can_be_read_at_once(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "made" / "on_the_way")
    file.write(SCALARS[:1])
    assert read(file.path.parent) == SCALARS[:1]
    file.write(SCALARS[1:])
    assert read(file.path.parent) == SCALARS


@settings(max_examples=10)
@given(st.lists(st.tuples(st.text("ab/_", min_size=1), st.floats(width=32, allow_nan=False), st.integers(0, 2**40))))
def test_any_scalars_come_back(tmp_path_factory: pytest.TempPathFactory, scalars: Scalars) -> None:
    directory = tmp_path_factory.mktemp("events")
    EventFile(directory).write(scalars)
    assert sorted(read(directory)) == sorted(scalars)


def test_first_write_makes_the_file() -> None:
    output = TensorBoardOutput(enabled=True, locate=default_directory)
    output.add_scalars([])
    assert not Path("runs").exists()
    output.add_scalars(SCALARS[:1])
    output.add_scalars(SCALARS[1:])
    assert output.path.parent == Path("runs")
    assert len(list(output.path.iterdir())) == 1
    assert read(output.path) == SCALARS


def test_requested_writer_takes_over() -> None:
    output = TensorBoardOutput(enabled=True, locate=default_directory)
    output.add_scalars(SCALARS[:1])
    writer = output.writer
    assert isinstance(writer, SummaryWriter)
    assert output.writer is writer
    writer.add_scalar("by the user", 3.0, 7)
    output.add_scalars(SCALARS[1:])
    assert sorted(read(output.path)) == sorted([*SCALARS, ("by the user", 3.0, 7)])
    # TensorBoard follows only the latest file of a directory, so later values go where the user's go.
    assert len(list(output.path.iterdir())) == 2
    writer.close()


def test_only_single_numbers_are_for_loggers() -> None:
    numbers = {"float": 1.5, "int": 2, "numpy": np.float32(3), "array": np.array(4)}
    others = {"left_out": 5, "vector": np.ones(2), "word": "six", "none": None, "array of a word": np.array("seven")}
    assert select_scalars({**numbers, **others}, leave_out=["left_out"]) == numbers
