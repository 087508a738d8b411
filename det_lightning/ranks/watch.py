"""Watching the progress of a rank: log its stack if it waits long, and end it if a signal cannot."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator

from det_lightning.escaping import get_logger
from det_lightning.ranks.signals import print_at_once, read_signal, record_signals, stop_recording
from det_lightning.ranks.store import Store, look

logger = get_logger(__name__)

NOTICE_VARIABLE = "DET_LIGHTNING_WAIT_NOTICE_S"
_NOTICE_AFTER_S = 60.0
_TICK_S = 1.0
_END_AFTER_GIVING_UP_S = 10.0
_SHOWN_FRAMES = 12
GAVE_UP = "watch/gave-up"  # the rank that gave up on the hyperparameters, and its reason
LEFT = "left"  # the number of ranks that have left the session
_SIGNALLED = "watch/signal"
#: Keys of the watches in the store; the last rank to leave deletes them.
KEYS = (GAVE_UP, LEFT, _SIGNALLED)


def notice_period_s() -> float:
    """Return the seconds without progress until a message reports a rank; 0 for never.

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


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


class ProgressWatch:
    """A thread that watches the thread that created it, while that exchanges objects or works on batches.

    Progress is another batch or another exchange. After a period without progress, the watch logs the stack; the next
    time, after at least twice as long. A Python handler of a signal runs only when a call to C++ returns, and a
    collective returns once all ranks have come. So once any rank received SIGTERM or SIGINT, or the store is lost, a
    further period without progress on batches ends the process. If another rank gave up on the hyperparameters and
    left, this happens sooner, with status 0.

    Attributes:
        exchanges: number of completed exchanges.
        awaited: the missing ranks of the current exchange.
        describe_progress: returns the batches for messages, for example ``"after 12 batches"``.
        gave_up: another rank that gave up on the hyperparameters, with the reason, as far as this rank has heard.
        ending: why the run is to end: a signal, a rank that gave up and left, or a lost store; else empty.
    """

    def __init__(self, rank: int, size: int, store: Store, notice_s: float) -> None:
        self.exchanges = 0
        self.awaited: Collection[int] = ()
        self.describe_progress: Callable[[], str] = str
        self.gave_up = ""
        self.ending = ""
        self._rank = rank
        self._store = store
        self._notice_s = notice_s
        self._tick_s = min(_TICK_S, notice_s / 6 or _TICK_S) * max(1.0, size / 64)
        self._is_in_batches = False
        self._signum = 0
        self._seen: object = None
        self._seen_first_s = 0.0
        self._log_after_s = notice_s
        self._watched = threading.get_ident()
        self._records_signals = record_signals()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="det_lightning-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def in_batches(self) -> Iterator[None]:
        """Watch a block that works on batches, or waits for their results."""
        before, self._is_in_batches = self._is_in_batches, True
        try:
            yield
        finally:
            self._is_in_batches = before

    def stop(self) -> None:
        """End the thread, which must not use the store any longer than this process does."""
        self._stopping.set()
        self._thread.join()
        if self._records_signals:
            stop_recording()

    def hear(self) -> None:
        """Update :attr:`gave_up`."""
        heard = (look(self._store, GAVE_UP) or b"").decode()
        self.gave_up = "" if heard.startswith(f"rank {self._rank} ") else heard

    def _watch(self) -> None:
        has_store = True
        while not self._stopping.wait(self._tick_s):
            if has_store:
                try:
                    self._listen()
                except RuntimeError:  # gone, together with the process that runs the store; no exchange can succeed
                    has_store = False
                    self.ending = self.ending or "lost the store of the ranks"
            self._look()

    def _listen(self) -> None:
        """Note when a rank receives a signal that ends processes, or gives up and leaves."""
        self.hear()
        if not self._signum and self._records_signals and (received := read_signal()):
            self._store.set(_SIGNALLED, str(received).encode())
        self._signum = self._signum or int(look(self._store, _SIGNALLED) or 0)
        signalled = f"received {signal.Signals(self._signum).name}" if self._signum else ""
        self.ending = self.gave_up if self.gave_up and look(self._store, LEFT) else signalled

    def _look(self) -> None:
        """Log the stack, or end the process, after a period without progress; a reason to end begins another period."""
        now = time.monotonic()
        progress = self.describe_progress()
        seen = (self.exchanges, progress, self.ending)
        if seen != self._seen or not (self._is_in_batches or self.awaited):
            self._seen, self._seen_first_s = seen, now
        still_s = now - self._seen_first_s
        end_after_s = _END_AFTER_GIVING_UP_S if self.gave_up else self._notice_s
        if self.ending and self._is_in_batches and 0 < end_after_s <= still_s:
            self._end(still_s)
        if 0 < self._log_after_s <= still_s:
            self._log_after_s = 2 * still_s
            did = f"waited {still_s:.0f} s for {name_ranks(self.awaited)}" if self.awaited else _on_a_batch(still_s)
            logger.warning("Rank %d has %s%s:\n%s", self._rank, did, progress and f", {progress}", self._format_stack())

    def _end(self, still_s: float) -> None:
        """Print the reason and the stack, and end this process."""
        rank = f"Rank {self._rank} (process {os.getpid()})"
        end = f"has since {_on_a_batch(still_s)}, and ends without saving"
        print_at_once(f"det_lightning: {self.ending}. {rank} {end}:\n{self._format_stack()}\n")
        os._exit(0 if self.gave_up else 128 + self._signum if self._signum else 1)

    def _format_stack(self) -> str:
        frame = sys._current_frames().get(self._watched)  # the documented way, in spite of its name
        return "".join(traceback.format_stack(frame, _SHOWN_FRAMES) if frame else ()).rstrip()


def _on_a_batch(still_s: float) -> str:
    return f"spent {still_s:.0f} s on a batch"
