"""Ctrl-C and SIGTERM end a training in time whenever they come, and cost no checkpoint but the one under way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from det_lightning import errors, pytorch
from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.storage.writing import CheckpointQueue
from tests.checkpoint import made_checkpoints
from tests.checkpoint.storage.backends import files_of
from tests.trials import SmallTrial

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals, and no fork"), pytest.mark.slow]


# At any line

# Names of the functions in writing.py that start or await a thread, or defer signals.
_OF_THREADS = ("defer_signal", "note", "defer_all_signals", "_run", "wait", "result", "take_complete", "write")


def interrupt_at(instruction: int, counted: Callable[[], Any]) -> list[tuple[str, int]]:
    """Run a function with a SIGINT at one of the instructions that start or await a thread; return all their lines."""
    lines: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if Path(code.co_filename).stem not in ("threading", "thread") and code.co_name not in _OF_THREADS:
            return None  # what it calls is traced all the same
        if event == "call":
            frame.f_trace_opcodes = True
        elif event == "opcode":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == instruction:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        counted()
    except KeyboardInterrupt:
        sys.settrace(None)
    finally:
        sys.settrace(None)
    return lines


def save_and_end(storage: CheckpointStorage, instruction: int) -> list[tuple[str, int]]:
    """Write a checkpoint in the background, with an interrupt; then do as the end of a run does."""
    code = storage.root.local_path.with_name("code")
    code.mkdir(exist_ok=True)
    queue = CheckpointQueue(storage.root, CodeCopier(code), in_background=True)

    def save() -> None:
        queue.write(files_of())
        queue.take_complete(wait=True)

    lines = interrupt_at(instruction, save)
    complete = queue.take_complete(wait=True)
    assert set(complete) <= set(storage.list_ids()), f"at instruction {instruction}"
    assert [path.name for path in storage.root.local_path.glob("*")] == storage.list_ids(), f"at {instruction}"
    return lines


def interrupt_each_line(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines = save_and_end(CheckpointStorage(folder / "count"), 0)
    # Python runs handlers after calls, before their results are stored, which mostly ends a line.
    last_instructions = {line: number for number, line in enumerate(lines, 1)}
    assert len(last_instructions) > 80
    for instruction in last_instructions.values():
        save_and_end(CheckpointStorage(folder / str(instruction)), instruction)


def test_interrupt_at_any_line_leaves_no_thread(tmp_path: Path) -> None:
    """The process also ends, so no thread is left over."""
    # A loader that another test has left raises in the __del__ of a forked process, and a signal that comes while
    # pytest formats that is lost, like any exception out of a __del__.
    gc.collect()
    gc.freeze()
    process = multiprocessing.get_context("fork").Process(target=interrupt_each_line, args=[tmp_path])
    process.start()
    gc.unfreeze()
    process.join(500)
    status = process.exitcode
    process.kill()
    process.join()
    assert status == 0


# What else must not keep a process from ending


class CheckpointHook(pytorch.PyTorchCallback):
    """Puts an object into each checkpoint."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["item"] = self.item


def train(storage: CheckpointStorage | Path, item: Any = None, async_write: bool = False, **trial: Any) -> None:
    hook, period = CheckpointHook(item), pytorch.Batch(4)
    made_checkpoints.train(storage, 6, callback=hook, period=period, async_write=async_write, **trial)


class WorkerKiller:
    """Kills a worker of a loader when it is copied or pickled."""

    def __reduce__(self) -> Any:
        for worker in multiprocessing.active_children():
            worker.kill()
        time.sleep(0.5)
        return dict, ()


class OneWorkerTrial(SmallTrial):
    num_workers = 1


@pytest.mark.parametrize("async_write", [False, True])
def test_dead_loader_worker_is_reported(async_write: bool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        train(tmp_path / "storage", WorkerKiller(), async_write, trial=OneWorkerTrial)
    assert not isinstance(raised.value, errors.CheckpointError)
    assert len(CheckpointStorage(tmp_path / "storage").list_ids()) == 1


class Endless:
    """Is never written by another thread than the main one."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def __reduce__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.begun.touch()
            time.sleep(600)
        return Endless, (self.begun,)


def train_endlessly(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(folder / "storage", Endless(folder / "begun"), async_write=True)


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=train_endlessly, args=[tmp_path])
    process.start()
    assert process.pid is not None
    while process.is_alive() and not (tmp_path / "begun").exists():
        time.sleep(0.05)
    for _ in range(40):
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        process.join(0.5)
    status = process.exitcode
    process.kill()
    assert status == -signal.SIGINT
