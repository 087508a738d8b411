"""Watching a rank: log the stack of a rank that waits long, and end a run that a signal cannot end otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from types import FrameType

import torch

from det_lightning.ranks.signals import print_at_once, signal_log
from det_lightning.ranks.store import Store, look

logger = logging.getLogger(__name__)

NOTICE_VARIABLE = "DET_LIGHTNING_WAIT_NOTICE_S"
_NOTICE_AFTER_S = 60.0
_TICK_S = 1.0
_TICK_AFTER_SIGNAL_S = 0.25
# Together less than 10 s, including the time of a tick and of a launcher.
_END_AFTER_SIGNAL_S = 4.0
_STILL_S = 3.5
_TOGETHER_S = 1.0
_SILENT_S = 10.0  # a killed rank says nothing; a slow rank, or a rank with Python's lock, may be late
_SHOWN_FRAMES = 12
GAVE_UP = "watch/gave-up"  # the rank that gave up on the hyperparameters, and its reason
LEFT = "left"  # the number of ranks that have left the session
_SIGNALLED = "watch/signal"
_STUCK = "watch/stuck"  # the number of ranks that are stuck since a signal
_MOVES = "watch/moves"  # grows while a rank is not stuck
_PLACE = "watch/place"  # the place of the first stuck rank
_HANGS = "watch/hangs"  # set if stuck ranks wait for each other: with NCCL also at any line that needs a result
#: Keys of the watches in the store; the last rank to leave deletes them.
KEYS = (GAVE_UP, LEFT, _SIGNALLED, _STUCK, _MOVES, _PLACE, _HANGS)

_EXCHANGES = "det_lightning.ranks."
_SHARDS = "torch.distributed.checkpoint."
# Modules that wait for other ranks: a backward pass averages gradients.
_WAITING = (_EXCHANGES, "torch.distributed.", "torch.nn.parallel.", "torch.autograd.", "horovod.")
# Modules that write checkpoints or load batches.
_WORKING = (
    _SHARDS,
    "det_lightning.checkpoint.",
    "det_lightning.core._checkpoint.",
    "det_lightning.engine.checkpointing.",
    "pytorch_lightning.callbacks.model_checkpoint.",
    "torch.serialization.",
    "torch.utils.data.",
)
# Modules of threads that wait, hold claims or delete checkpoints.
_IDLE = (_EXCHANGES, "det_lightning.checkpoint.retention.", "torch.utils.data._utils.pin_memory.")


def notice_period_s() -> float:
    """Return the seconds of waiting until a message reports a rank; 0 for never.

    Raises:
        ValueError: the environment variable is not a number of seconds.
    """
    given = os.environ.get(NOTICE_VARIABLE, "")
    try:
        period_s = float(given or _NOTICE_AFTER_S)
    except ValueError:
        period_s = -1.0
    if not 0 <= period_s < float("inf"):
        raise ValueError(f"{NOTICE_VARIABLE} must be a number of seconds, or 0 for no notice; got {given!r}.")
    return period_s


@dataclasses.dataclass
class RankActivity:
    """The activity of a rank, for the rank's own watch.

    ``exchanges`` counts completed exchanges, ``awaited`` holds the missing ranks of the current exchange, and
    ``describe_progress`` returns the progress for messages, for example ``"batch 12"``.
    """

    rank: int
    size: int
    exchanges: int = 0
    awaited: Collection[int] = ()
    describe_progress: Callable[[], str] = str


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


class RankWatch:
    """A thread that watches the thread that created it.

    The watch logs the stack of a thread that has not moved for the notice period. After a SIGTERM or SIGINT to any rank
    the watches of all ranks end the run once no rank moves any more: a Python handler runs only when a call to C++
    returns, and a collective returns once all ranks have come. A run that writes a checkpoint or waits for a batch goes
    on.
    """

    def __init__(self, activity: RankActivity, store: Store, notice_s: float) -> None:
        self._activity = activity
        self._store = store
        self._notice_s = notice_s
        self._tick_s = min(_TICK_S, notice_s / 6 or _TICK_S) * max(1.0, activity.size / 64)
        self._watched = threading.get_ident()
        self._clock = getattr(time, "pthread_getcpuclockid", lambda thread: None)(self._watched)
        self._last_look: tuple[object, float, float] = ((), 0.0, 0.0)
        self._moved_at_s = time.monotonic()
        self._is_logged = False
        self._is_stuck = False
        self._moves: tuple[bytes | None, float] = (None, 0.0)  # the value in the store, and since when
        self._signalled_at_s: float | None = None
        #: Another rank that gave up on the hyperparameters, with the reason, as far as this rank has heard.
        self.gave_up = ""
        self._sees_signals = signal_log.open()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="det_lightning-watch", daemon=True)
        self._thread.start()

    @property
    def signalled(self) -> bool:
        """Whether any rank received a signal that ends processes, or gave up on the hyperparameters."""
        return self._signalled_at_s is not None

    def stop(self) -> None:
        """End the thread, which must not use the store any longer than this process does."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._sees_signals:
            self._sees_signals = False
            signal_log.close()

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(min(self._tick_s, _TICK_AFTER_SIGNAL_S) if self.signalled else self._tick_s):
                self._listen()
                if innermost := self._look():
                    self._log_if_due(innermost)
                    self._end_if_hung(innermost)
                del innermost  # not kept until the next tick: a frame holds all values of a user's function
            self._count_as_stuck(False)
        except RuntimeError:
            # The store is gone, together with the rank that runs the store; the next exchange reports the loss.
            logger.debug("No rank is watched any more.", exc_info=True)

    def hear(self) -> None:
        """Update :attr:`gave_up`."""
        heard = (look(self._store, GAVE_UP) or b"").decode()
        self.gave_up = "" if heard.startswith(f"rank {self._activity.rank} ") else heard

    def _listen(self) -> None:
        """Note when a rank receives a signal that ends processes, or gives up."""
        self.hear()
        if self.signalled:
            return
        if self._sees_signals and (found := signal_log.first()) is not None:
            signum, self._signalled_at_s = found
            self._store.set(_SIGNALLED, str(signum).encode())
        elif look(self._store, _SIGNALLED) or (self.gave_up and look(self._store, LEFT)):
            self._signalled_at_s = time.monotonic()

    def _look(self) -> FrameType | None:
        """Return the innermost frame of the watched thread, None if the thread has ended; note whether it has moved.

        Frames inside an exchange of objects are left out: an exchange polls, so these change while the rank waits.
        """
        frames = _walk(sys._current_frames().get(self._watched))  # the documented way, in spite of its name
        exchanges = [index for index, frame in enumerate(frames) if _module(frame).startswith(_EXCHANGES)]
        frames = frames[exchanges[-1] if exchanges else 0 :]
        position = [(id(frame), frame.f_lasti) for frame in frames]
        seen = (position, self._activity.describe_progress(), self._activity.exchanges)
        now = time.monotonic()
        used_s = 0.0
        # Waiting for a GPU takes processor time.
        if self._clock is not None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contextlib.suppress(OSError):  # the thread has ended
                used_s = time.clock_gettime(self._clock)
        last_seen, last_s, last_used_s = self._last_look
        if seen != last_seen or used_s - last_used_s > 0.1 * (now - last_s):
            self._moved_at_s = now
            self._is_logged = False
        self._last_look = (seen, now, used_s)
        return frames[0] if frames else None

    def _log_if_due(self, innermost: FrameType) -> None:
        """Log the stack, once, if the watched thread has neither moved nor computed for the notice period."""
        still_s = time.monotonic() - self._moved_at_s
        if self._is_logged or not self._notice_s or still_s < self._notice_s:
            return
        self._is_logged = True
        said = f"waited {still_s:.0f} s" if _is_waiting(innermost) else f"been here for {still_s:.0f} s"
        awaited = f" for {name_ranks(self._activity.awaited)}" if self._activity.awaited else ""
        progress = self._activity.describe_progress()
        after = progress and f", {progress}"
        logger.warning("Rank %d has %s%s%s:\n%s", self._activity.rank, said, awaited, after, _format(innermost))

    def _end_if_hung(self, innermost: FrameType) -> None:
        """After a signal, end this process if no rank moves and at least one waits for another."""
        if self._signalled_at_s is None:
            return
        now = time.monotonic()
        since_signal_s = now - self._signalled_at_s
        waits = _is_waiting(innermost)
        # A thread that waits for no rank may be saving the run, unless it has been here since before the signal.
        is_still = now - self._moved_at_s > (_STILL_S if waits else since_signal_s)
        self._count_as_stuck(since_signal_s > _END_AFTER_SIGNAL_S and is_still and not _is_any_thread_busy())
        if not self._is_stuck:
            self._store.add(_MOVES, 1)
            return
        place = traceback.format_stack(innermost, 1)[0].encode()
        if self._store.compare_set(_PLACE, "", place) != place or waits:
            self._store.set(_HANGS, b"1")
        if (moves := look(self._store, _MOVES)) != self._moves[0]:
            self._moves = (moves, now)
        still_ranks = sum(int(look(self._store, key) or 0) for key in (_STUCK, LEFT))
        no_rank_moves = still_ranks >= self._activity.size or now - self._moves[1] >= _SILENT_S
        if no_rank_moves and look(self._store, _HANGS):
            self._end(innermost)

    def _count_as_stuck(self, is_stuck: bool) -> None:
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            self._store.add(_STUCK, 1 if is_stuck else -1)

    def _end(self, innermost: FrameType) -> None:
        """Print the reason and the stack, and end this process."""
        signum = int(look(self._store, _SIGNALLED) or signal.SIGTERM)
        why = self.gave_up or f"received {signal.Signals(signum).name}"
        where = "." if self.gave_up else f", in:\n{_format(innermost)}"
        rank = f"Rank {self._activity.rank} (process {os.getpid()})"
        print_at_once(f"det_lightning: {why}. No rank moves. {rank} ends without saving{where}\n")
        # All ranks should notice that no rank moves before a lost connection raises an error anywhere.
        self._stopping.wait(_TOGETHER_S)
        os._exit(0 if self.gave_up else 128 + signum)


def _is_waiting(innermost: FrameType) -> bool:
    """Return whether a thread with this innermost frame waits for other ranks."""
    module = _module(innermost)
    return module.startswith(_WAITING) and not module.startswith(_SHARDS)


def _is_any_thread_busy() -> bool:
    """Return whether a thread of this process loads a batch or writes a checkpoint, and waits for no other rank."""
    for innermost in sys._current_frames().values():
        modules = list(map(_module, _walk(innermost)))
        works = any(module.startswith(_WORKING) for module in modules)
        if works and not _is_waiting(innermost) and not any(module.startswith(_IDLE) for module in modules):
            return True
    return False


def _walk(innermost: FrameType | None) -> list[FrameType]:
    return [] if innermost is None else [frame for frame, _ in traceback.walk_stack(innermost)]


def _module(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


def _format(innermost: FrameType) -> str:
    return "".join(traceback.format_stack(innermost, _SHOWN_FRAMES)).rstrip()
