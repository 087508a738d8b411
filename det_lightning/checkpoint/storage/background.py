"""Writing checkpoints in order, at once or in a background thread during training."""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.storage import writing
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.checkpoint.storage.location import new_id
from det_lightning.checkpoint.storage.snapshots import Snapshotter, iterate_tensors
from det_lightning.checkpoint.storage.staging import StagingDirectory
from det_lightning.checkpoint.storage.writing import ReportWritten
from det_lightning.escaping import get_logger

logger = get_logger(__name__)

_Result = TypeVar("_Result")

#: When a loader's worker dies, torch raises an error in the handler of this signal, so wherever the main thread is: a
#: writer would take it for its own error. None on Windows.
WORKER_DIED: int | None = getattr(signal, "SIGCHLD", None)

# How long the handler of a signal may be delayed while the main thread waits for another thread.
_POLL_S = 0.05


@contextlib.contextmanager
def defer_signal(number: int | None) -> Iterator[None]:
    """Defer the handler of a signal that arrives inside the block until the block ends, even with an error.

    Only handlers in Python can raise: without such a handler, or outside the main thread, nothing is deferred.
    """
    handler: Any = None if number is None else signal.getsignal(number)
    if number is None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def note(signum: int, frame: FrameType | None) -> None:
        arrived.append((signum, frame))

    try:
        signal.signal(number, note)
        yield
    finally:
        if signal.getsignal(number) is note:  # otherwise the block installed another handler
            signal.signal(number, handler)
        if arrived:
            handler(*arrived[0])


@contextlib.contextmanager
def defer_all_signals() -> Iterator[None]:
    """Defer the handlers of all signals, like :func:`defer_signal`; for short blocks."""
    with contextlib.ExitStack() as stack:
        for number in sorted(signal.valid_signals()):
            if callable(signal.getsignal(number)):
                stack.enter_context(defer_signal(number))
        yield


class BackgroundTask(Generic[_Result]):
    """Work that starts in a new thread with the construction; the process waits for the thread before exit.

    Construct and store a task while signals are deferred: otherwise the thread may run although the caller was
    interrupted before having the task. Both threads share only the end: an interrupted main thread could leave a common
    lock locked.
    """

    def __init__(self, work: Callable[[], _Result], name: str) -> None:
        self._result: _Result
        self._error: BaseException | None = None
        self.is_done = False
        self._thread = threading.Thread(target=self._run, args=[work], name=name)
        self._thread.start()

    def _run(self, work: Callable[[], _Result]) -> None:
        try:
            self._result = work()
        except BaseException as e:  # raised by result()
            self._error = e
        self.is_done = True

    def wait(self) -> None:
        """Wait until the thread has ended. An interrupted wait can be repeated."""
        # Before Python 3.13, an interrupted join() may mark a running thread as ended.
        while not self.is_done:
            with defer_all_signals():
                self._thread.join(_POLL_S)
        with defer_all_signals():
            self._thread.join()

    def result(self) -> _Result:
        """Wait; return the result of the work, or raise the error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CheckpointQueue:
    """Writes checkpoints into a storage in order; if ``in_background``, copies the state and writes in another thread.

    The next call raises an error from the background, once.
    """

    def __init__(self, storage: CheckpointStorage, code: CodeCopier | None = None, in_background: bool = False) -> None:
        self._storage = storage
        self._code = code or CodeCopier()
        self._snapshotter = Snapshotter() if in_background else None
        self._reserving: list[BackgroundTask[None]] | None = None  # None before the first run
        self._under_way: BackgroundTask[str] | None = None
        self._complete: list[str] = []  # ids that take_complete() has not returned yet
        self._hurries = False

    def limit_retries_when(self, is_ending: Callable[[], bool]) -> None:
        """Once ``is_ending()`` is true, retry a failing transfer only once, after a second at most."""
        self._storage.limit_retries_when(lambda: self._hurries or is_ending())

    def reserve_memory(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Reserve memory for copies of the states of models, and of optimizers after the first step.

        Nothing is reserved if training waits for the writing anyway, or in a second run, which reuses the memory.
        """
        if self._snapshotter is None or self._reserving is not None:
            return
        self._reserving = []
        self._reserve([model.state_dict() for model in models])
        for optimizer in optimizers:
            self._expect_state(optimizer)

    def _expect_state(self, optimizer: torch.optim.Optimizer) -> None:
        def reserve(*_: Any) -> None:
            hook.remove()
            self._reserve(optimizer.state_dict())

        # Optimizers that wrap another one often skip Optimizer.__init__(), and then have no hooks.
        with contextlib.suppress(AttributeError):
            hook = optimizer.register_step_post_hook(reserve)

    def _reserve(self, state: Any) -> None:
        if self._snapshotter is not None and self._reserving is not None:
            allocate = self._snapshotter.reserving(iterate_tensors(state))
            with defer_all_signals():
                self._reserving.append(BackgroundTask(allocate, name="checkpoint memory"))

    def _wait_for_memory(self) -> None:
        while self._reserving:
            self._reserving[-1].wait()
            self._reserving.pop().result()

    def write(
        self,
        content: CheckpointContent,
        checkpoint_id: str | None = None,
        report_written: ReportWritten | None = None,
        before: ReportWritten | None = None,
        after: Callable[[], object] | None = None,
    ) -> str:
        """Write a checkpoint once the previous checkpoint is complete, or start writing; return the id.

        With ``report_written``, which may look at the trial, only the last file and the upload are left to the
        background. ``before`` is called with the directory before the checkpoint becomes complete, ``after`` once it
        is, both by the thread that writes.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
            RuntimeError: a loader's worker died meanwhile; the checkpoint is written nevertheless.
        """
        if self._under_way is not None:
            self.wait()
        new = checkpoint_id or new_id()

        def complete(staging: StagingDirectory) -> str:
            writing.complete(staging, content, self._code, before)
            if after is not None:
                after()
            return new

        with defer_signal(WORKER_DIED):
            if self._snapshotter is not None and report_written is None:
                content = self._copy(self._snapshotter, content, new)
                finish = functools.partial(self._write_copied, self._snapshotter, content, new, complete)
            else:
                staging = self._storage.stage(new)
                writing.write_files(staging, content, self._code, report_written)
                finish = functools.partial(complete, staging)
            if self._snapshotter is not None:
                with defer_all_signals():
                    self._under_way = BackgroundTask(finish, name="checkpoint")
            else:
                self._complete.append(finish())
        return new

    def is_under_way(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self._under_way is not None and not self._under_way.is_done

    def wait(self) -> None:
        """Wait for the checkpoint under way; raise any error."""
        if (under_way := self._under_way) is not None:
            under_way.wait()  # if this is interrupted, it stays under way
            with defer_all_signals():
                self._under_way = None
                self._complete.append(under_way.result())

    def take_complete(self, wait: bool = False) -> list[str]:
        """Return the ids of the checkpoints that became complete since the last call, or raise an error of one.

        If ``wait``, wait for the checkpoint under way.
        """
        if self._under_way is not None and (wait or self._under_way.is_done):
            self.wait()
        if wait:
            self._wait_for_memory()
        complete = self._complete
        self._complete = []
        return complete

    def forget(self) -> None:
        """Wait for the checkpoint that an interrupted run has left under way, and drop the id."""
        try:
            self.take_complete(wait=True)
        except errors.CheckpointError as e:
            logger.warning("A checkpoint of an earlier run cannot be written: %s", e)

    def finish_in_a_hurry(self) -> list[str]:
        """Wait for the checkpoint under way; return the ids of newly complete checkpoints."""
        self._hurries = True
        if self.is_under_way():
            logger.warning(
                "A checkpoint is being written, and the process waits for the end. Ctrl-C discards the checkpoint."
            )
        try:
            return self.take_complete(wait=True)
        finally:
            self._hurries = False  # the storage may be used by another run

    def _copy(self, snapshotter: Snapshotter, content: CheckpointContent, checkpoint_id: str) -> CheckpointContent:
        try:
            self._wait_for_memory()
            return snapshotter.copy(content, content.copies)
        except (RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
            raise errors.CheckpointError(
                f"Checkpoint {checkpoint_id} cannot be written: its state cannot be copied: {e}."
            ) from e

    def _write_copied(
        self,
        snapshotter: Snapshotter,
        copied: CheckpointContent,
        checkpoint_id: str,
        complete: Callable[[StagingDirectory], str],
    ) -> str:
        snapshotter.wait_for_device()
        staging = self._storage.stage(checkpoint_id)
        writing.write_files(staging, copied, self._code)
        return complete(staging)
