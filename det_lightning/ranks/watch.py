"""Watching the ranks of a run: logs which of them wait for which, and ends those that no signal can end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch

from det_lightning.ranks.signals import print_at_once, signal_log
from det_lightning.ranks.stack import Place, place_of, position_of, writes_a_checkpoint
from det_lightning.ranks.store import Store, look

logger = logging.getLogger(__name__)

NOTICE_VARIABLE = "DET_LIGHTNING_WAIT_NOTICE_S"
_NOTICE_AFTER_S = 60.0
_TICK_S = 1.0
_SILENT_TICKS = 10  # a process may be slow, or its threads may wait for the one that holds Python's lock
_LOOK_S = 0.02  # between two looks at the stack after a signal, so that a loop is seen at different lines
# Together less than 10 s, including the time that a tick and a launcher take.
_END_AFTER_SIGNAL_S = 4.0
_STILL_S = 3.5
_TOGETHER_S = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT)
SIGNALLED = "watch/signal"
GAVE_UP = "watch/gave-up"  # which rank gave up on the hyperparameters, and why
ENDED = "watch/ended"
LEFT = "left"  # how many ranks have left the session


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


@dataclasses.dataclass
class RankStatus:
    """What a rank publishes about itself."""

    rank: int
    tick: int = 0  # how often it has published
    where: str = ""
    waits: bool = False
    still_s: float = 0.0  # how long it has not moved
    stuck: bool = False  # whether it should have moved since a signal
    awaited: list[int] = dataclasses.field(default_factory=list)  # the ranks that it waits for, if known
    noticed: bool = False  # whether there was a message about it


def describe_wait(own: RankStatus, statuses: Sequence[RankStatus], silent: Collection[int]) -> str:
    """Return a sentence that says where ``own`` waits for which ranks, and where those are."""
    alike = [found for found in statuses if found.where == own.where and found.rank not in silent]
    others = [found for found in statuses if found not in alike]
    awaited = [found.rank for found in others if found.rank in own.awaited] or [found.rank for found in others]
    sentence = _describe_alike(alike, own.still_s)
    if awaited and own.waits:
        sentence += f", for {name_ranks(awaited)}"
    by_place: dict[str, list[RankStatus]] = {}
    for found in others:
        by_place.setdefault("" if found.rank in silent else found.where, []).append(found)
    rest = [_describe_alike(there, there[0].still_s) for where, there in by_place.items() if where]
    if unheard := by_place.get(""):
        rest.append(f"nothing is heard of {name_ranks([found.rank for found in unheard])}")
    sentence = "; ".join([sentence, *rest]) if others else f"{sentence}, where all ranks are"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _describe_alike(statuses: Sequence[RankStatus], still_s: float) -> str:
    """Return where ranks at the same place are, and for how long."""
    first = statuses[0]
    several = len(statuses) > 1
    if still_s < 1:
        verb = "are in" if several else "is in"
    else:
        verb = f"{'have' if several else 'has'} {'waited' if first.waits else 'been'} {still_s:.0f} s in"
    return f"{name_ranks([found.rank for found in statuses])} {verb} {first.where}"


def name_ranks(ranks: Collection[int]) -> str:
    """Return ``"rank 1"`` or ``"ranks 1, 3"``."""
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


class RankWatch:
    """A thread that watches the thread that created it, and publishes where that is in the store of a session.

    It logs which ranks wait for which once that thread has not moved for the notice period. After a SIGTERM or SIGINT
    to any rank it ends this process if no rank moves any more: a Python handler runs only when a call to C++ returns,
    as a collective does once all ranks have come. A run that writes a checkpoint or waits for a batch goes on.
    """

    def __init__(self, activity: RankActivity, store: Store, notice_s: float) -> None:
        self._activity = activity
        self._store = store
        self._notice_s = notice_s
        self._pause_s = min(_TICK_S, self._notice_s / 6 or _TICK_S) * max(1.0, activity.size / 64)
        self._watched = threading.get_ident()
        self._last_move_s = time.monotonic()
        self._last_seen: tuple[object, ...] = ()
        self._cpu = _CpuTime(self._watched)
        self._ticks = 0
        self._noticed = False
        self._heard: dict[int, tuple[int, float]] = {}
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
            while not self._pause():
                status = self._look()
                self._store.set(f"watch/{status.rank}", json.dumps(dataclasses.asdict(status)).encode())
                self._look_for_signals()
                self._end_if_hung(status)
                self._notice_if_due(status)
        except RuntimeError:
            # The store is gone, together with the rank that runs it; the next exchange reports that.
            logger.debug("No rank is watched any more.", exc_info=True)
        finally:
            if self._stopping.is_set():
                with contextlib.suppress(RuntimeError):  # the store has ended before this rank
                    self._store.delete_key(f"watch/{self._activity.rank}")

    def _pause(self) -> bool:
        """Wait until the next tick, looking at the stack more often after a signal; return whether to stop."""
        if self._signalled_at_s is None:
            return self._stopping.wait(self._pause_s)
        end_s = time.monotonic() + min(self._pause_s, 0.5)
        while time.monotonic() < end_s and not self._stopping.wait(_LOOK_S):
            self._note_move()
        return self._stopping.is_set()

    def _note_move(self) -> None:
        seen = (position_of(self._watched), self._activity.describe_progress(), sum(self._activity.rounds.values()))
        if seen != self._last_seen or self._cpu.is_used():
            self._last_seen = seen
            self._last_move_s = time.monotonic()
            self._noticed = False

    def _look(self) -> RankStatus:
        self._note_move()
        place = place_of(self._watched)
        self._ticks += 1
        progress = self._activity.describe_progress()
        where = "no thread" if place is None else place.text
        still_s = time.monotonic() - self._last_move_s
        return RankStatus(
            rank=self._activity.rank,
            tick=self._ticks,
            where=f"{where}, {progress}" if progress else where,
            waits=place is not None and place.waits,
            still_s=still_s,
            stuck=place is not None and self._is_stuck(place, still_s),
            awaited=list(self._activity.awaited),
            noticed=self._noticed,
        )

    def _is_stuck(self, place: Place, still_s: float) -> bool:
        """Return whether, since the run got a signal, this rank has waited too long or not moved at all."""
        if self._signalled_at_s is None or place.loads or writes_a_checkpoint():
            return False
        since_signal_s = time.monotonic() - self._signalled_at_s
        # Something that began after the signal and waits for no other rank may be saving the run.
        return since_signal_s > _END_AFTER_SIGNAL_S and still_s > (_STILL_S if place.waits else since_signal_s)

    def _look_for_signals(self) -> None:
        """Note when this rank or another one received a signal that ends processes, or gave up."""
        heard = (look(self._store, GAVE_UP) or b"").decode()
        self.gave_up = "" if heard.startswith(f"rank {self._activity.rank} ") else heard
        if self._signalled_at_s is not None:
            return
        found = signal_log.first_of(_ENDING) if self._sees_signals else None
        if found is not None:
            self._signalled_at_s = found[1]
            self._store.set(SIGNALLED, str(int(found[0])).encode())
        elif look(self._store, SIGNALLED) or (self.gave_up and look(self._store, LEFT)):
            self._signalled_at_s = time.monotonic()

    def _notice_if_due(self, own: RankStatus) -> None:
        """Log which ranks wait for which, on the lowest of the ranks that have waited for the notice period."""
        if not self._notice_s or self._noticed or own.still_s < self._notice_s - (_SILENT_TICKS + 2) * self._pause_s:
            return
        statuses, silent = self._hear(own)
        waiting = [found for found in statuses if found.still_s >= self._notice_s - self._pause_s]
        first = min((found for found in waiting if found.waits), default=own, key=lambda found: found.rank)
        # That another rank waits elsewhere, perhaps for this one, may have been said; that this one waits too is news.
        is_said = any(found.noticed and found.where == own.where for found in waiting)
        if own.still_s < self._notice_s or is_said or first.rank != own.rank:
            return
        self._noticed = True
        # If a rank waits for its GPU, the GPU may be waiting for other ranks.
        if own.waits or (_uses_gpu() and len({found.where for found in statuses}) > 1):
            logger.warning("%s", describe_wait(own, statuses, silent))

    def _end_if_hung(self, own: RankStatus) -> None:
        """End this process if all ranks of the run are stuck, or if another rank has ended for that reason."""
        if self.signalled and look(self._store, ENDED):
            self._end("Another rank has ended because no rank moved.")
        if not own.stuck:
            return
        statuses, silent = self._hear(own)
        alive = [found for found in statuses if found.rank not in silent]
        apart = len({found.where for found in statuses}) > 1
        if not all(found.stuck for found in alive) or not (apart or own.waits):
            return
        # The others should end too before a lost connection raises an error in them, which would end them more slowly.
        self._end(f"No rank moves. {describe_wait(own, statuses, silent)}", after_s=_TOGETHER_S)

    def _end(self, reason: str, after_s: float = 0.0) -> None:
        """Print the reason, let the other ranks know, and end this process."""
        signum = int(look(self._store, SIGNALLED) or signal.SIGTERM)
        why = self.gave_up or f"received {signal.Signals(signum).name}"
        print_at_once(f"det_lightning: {why}. {reason} Process {os.getpid()} ends without saving.\n")
        self._store.set(ENDED, b"1")
        self._stopping.wait(after_s)
        os._exit(0 if self.gave_up else 128 + signum)

    def _hear(self, own: RankStatus) -> tuple[list[RankStatus], set[int]]:
        """Return what the ranks have published, in rank order, and which have published nothing for several ticks."""
        statuses = [own if rank == own.rank else self._status_of(rank) for rank in range(self._activity.size)]
        now = time.monotonic()
        silent = set()
        for found in statuses:
            if self._heard.get(found.rank, (None, 0.0))[0] != found.tick:
                self._heard[found.rank] = (found.tick, now)
            if not found.tick or now - self._heard[found.rank][1] > _SILENT_TICKS * max(self._pause_s, _TICK_S):
                silent.add(found.rank)
        return statuses, silent

    def _status_of(self, rank: int) -> RankStatus:
        published = look(self._store, f"watch/{rank}")
        return RankStatus(rank) if published is None else RankStatus(**json.loads(published))


class _CpuTime:
    """The processor time of a thread, which tells a long computation from waiting, unless torch uses a GPU."""

    def __init__(self, thread: int) -> None:
        get_clock = getattr(time, "pthread_getcpuclockid", None)
        self._clock = None if get_clock is None else get_clock(thread)
        self._before = (0.0, 0.0)

    def is_used(self) -> bool:
        """Return whether the thread has computed for more than a tenth of the time since the last call."""
        if self._clock is None or _uses_gpu():  # waiting for a GPU takes processor time
            return False
        try:
            now = (time.monotonic(), time.clock_gettime(self._clock))
        except OSError:  # the thread has ended
            return False
        elapsed_s, used_s = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        return used_s > 0.1 * elapsed_s


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
