"""Watching a rank: logs its stack when it waits long, and ends the ranks of a run that no signal can end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection
from types import FrameType

import torch

from det_lightning.ranks.signals import print_at_once, signal_log
from det_lightning.ranks.stack import find_frames, is_busy, is_waiting
from det_lightning.ranks.store import Store, look

logger = logging.getLogger(__name__)

NOTICE_VARIABLE = "DET_LIGHTNING_WAIT_NOTICE_S"
_NOTICE_AFTER_S = 60.0
_TICK_S = 1.0
_TICK_AFTER_SIGNAL_S = 0.25
# Together less than 10 s, including the time that a tick and a launcher take.
_END_AFTER_SIGNAL_S = 4.0
_STILL_S = 3.5
_TOGETHER_S = 1.0
_SILENT_S = 10.0  # a rank that was killed says nothing; a slow one, or one that holds Python's lock, may be late
_SHOWN_FRAMES = 12
GAVE_UP = "watch/gave-up"  # which rank gave up on the hyperparameters, and why
LEFT = "left"  # how many ranks have left the session
_SIGNALLED = "watch/signal"
_STUCK = "watch/stuck"  # how many ranks are stuck since a signal
_MOVES = "watch/moves"  # grows while a rank is not stuck
_PLACE = "watch/place"  # where the first of the stuck ranks is
_HANGS = "watch/hangs"  # set if ranks are stuck because they wait for each other
#: What watches store; the last rank to leave deletes it.
KEYS = (GAVE_UP, LEFT, _SIGNALLED, _STUCK, _MOVES, _PLACE, _HANGS)


def notice_period_s() -> float:
    """Return after how many seconds of waiting a message reports it; 0 for never.

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
    """What a rank does, as its own watch sees it.

    ``rounds`` counts the exchanges that it has completed in each group; ``awaited`` holds the ranks that it waits for;
    ``describe_progress`` returns its progress for messages, such as ``"batch 12"``.
    """

    rank: int
    size: int
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    awaited: Collection[int] = ()
    describe_progress: Callable[[], str] = str


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


class RankWatch:
    """A thread that watches the thread that created it.

    It logs the stack of a thread that has not moved for the notice period. After a SIGTERM or SIGINT to any rank the
    watches of all ranks end the run if no rank moves any more: a Python handler runs only when a call to C++ returns,
    as a collective does once all ranks have come. A run that writes a checkpoint or waits for a batch goes on.
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
        self._moves: tuple[bytes | None, float] = (None, 0.0)  # what the store holds, and since when
        self._signalled_at_s: float | None = None
        #: Which other rank gave up on the hyperparameters, and why, as far as this rank has heard.
        self.gave_up = ""
        self._sees_signals = signal_log.open()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="det_lightning-watch", daemon=True)
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

    def _run(self) -> None:
        try:
            while not self._stopping.wait(min(self._tick_s, _TICK_AFTER_SIGNAL_S) if self.signalled else self._tick_s):
                self._tick()
            self._count_as_stuck(False)
        except RuntimeError:
            # The store is gone, together with the rank that runs it; the next exchange reports that.
            logger.debug("No rank is watched any more.", exc_info=True)

    def _tick(self) -> None:
        self._listen()
        if frames := self._look():  # not kept until the next tick, as they hold what the user's functions hold
            self._log_if_due(frames[0])
            self._end_if_hung(frames[0])

    def _listen(self) -> None:
        """Note when this rank or another one received a signal that ends processes, or gave up."""
        heard = (look(self._store, GAVE_UP) or b"").decode()
        self.gave_up = "" if heard.startswith(f"rank {self._activity.rank} ") else heard
        if self.signalled:
            return
        if self._sees_signals and (found := signal_log.first()) is not None:
            signum, self._signalled_at_s = found
            self._store.set(_SIGNALLED, str(signum).encode())
        elif look(self._store, _SIGNALLED) or (self.gave_up and look(self._store, LEFT)):
            self._signalled_at_s = time.monotonic()

    def _look(self) -> list[FrameType]:
        """Return the frames of the watched thread, and note whether it has moved or computed since the last look."""
        frames = find_frames(self._watched)
        position = [(id(frame), frame.f_lasti) for frame in frames]
        seen = (position, self._activity.describe_progress(), sum(self._activity.rounds.values()))
        now = time.monotonic()
        used_s = 0.0
        if self._clock is not None and not _uses_gpu():  # waiting for a GPU takes processor time
            with contextlib.suppress(OSError):  # the thread has ended
                used_s = time.clock_gettime(self._clock)
        last_seen, last_s, last_used_s = self._last_look
        if seen != last_seen or used_s - last_used_s > 0.1 * (now - last_s):
            self._moved_at_s = now
            self._is_logged = False
        self._last_look = (seen, now, used_s)
        return frames

    def _log_if_due(self, innermost: FrameType) -> None:
        """Log the stack, once, if the watched thread has neither moved nor computed for the notice period."""
        still_s = time.monotonic() - self._moved_at_s
        if self._is_logged or not self._notice_s or still_s < self._notice_s:
            return
        self._is_logged = True
        said = f"waited {still_s:.0f} s" if is_waiting(innermost) else f"been here for {still_s:.0f} s"
        awaited = f" for {name_ranks(self._activity.awaited)}" if self._activity.awaited else ""
        progress = self._activity.describe_progress()
        after = progress and f", {progress}"
        logger.warning("Rank %d has %s%s%s:\n%s", self._activity.rank, said, awaited, after, _format(innermost))

    def _end_if_hung(self, innermost: FrameType) -> None:
        """After a signal, end this process if no rank moves and at least one waits for another."""
        if self._signalled_at_s is None:
            return
        waits = is_waiting(innermost)
        self._count_as_stuck(self._is_still_since(self._signalled_at_s, waits) and not is_busy())
        if not self._is_stuck:
            self._store.add(_MOVES, 1)
            return
        place = traceback.format_stack(innermost, 1)[0].encode()
        if self._store.compare_set(_PLACE, "", place) != place or waits:
            self._store.set(_HANGS, b"1")
        if not self._some_rank_moves() and look(self._store, _HANGS):
            self._end(innermost)

    def _is_still_since(self, signal_s: float, waits: bool) -> bool:
        now = time.monotonic()
        since_signal_s = now - signal_s
        # Something that began after the signal and waits for no other rank may be saving the run.
        longest_s = _STILL_S if waits else since_signal_s
        return since_signal_s > _END_AFTER_SIGNAL_S and now - self._moved_at_s > longest_s

    def _some_rank_moves(self) -> bool:
        now = time.monotonic()
        if (moves := look(self._store, _MOVES)) != self._moves[0]:
            self._moves = (moves, now)
        counted = sum(int(look(self._store, key) or 0) for key in (_STUCK, LEFT))
        return counted < self._activity.size and now - self._moves[1] < _SILENT_S

    def _count_as_stuck(self, is_stuck: bool) -> None:
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            self._store.add(_STUCK, 1 if is_stuck else -1)

    def _end(self, innermost: FrameType) -> None:
        """Print why and where this process ends, and end it."""
        signum = int(look(self._store, _SIGNALLED) or signal.SIGTERM)
        why = self.gave_up or f"received {signal.Signals(signum).name}"
        where = "." if self.gave_up else f", in:\n{_format(innermost)}"
        rank = f"Rank {self._activity.rank} (process {os.getpid()})"
        print_at_once(f"det_lightning: {why}. No rank moves. {rank} ends without saving{where}\n")
        # The others should see that no rank moves before a lost connection raises an error in them.
        self._stopping.wait(_TOGETHER_S)
        os._exit(0 if self.gave_up else 128 + signum)


def _format(innermost: FrameType) -> str:
    return "".join(traceback.format_stack(innermost, _SHOWN_FRAMES)).rstrip()


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
