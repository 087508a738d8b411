"""The session of a run's ranks: their rendezvous at a store, the end of each, and the watch over their progress."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from det_lightning import errors
from det_lightning.escaping import get_logger
from det_lightning.ranks.signals import print_at_once
from det_lightning.ranks.store import LONGEST_PAUSE_S, Store, StoreAddress, look, pauses, reach, serve, within

logger = get_logger(__name__)

NOTICE_VARIABLE = "DET_LIGHTNING_WAIT_NOTICE_S"
_NOTICE_AFTER_S = 60.0
_TICK_S = 1.0
_END_AFTER_GIVING_UP_S = 10.0
_SHOWN_FRAMES = 12
GAVE_UP = "watch/gave-up"  # the rank that gave up on the hyperparameters, and its reason
LEFT = "left"  # the number of ranks that have left the session
#: Keys of the watches in the store; the last rank to leave deletes them.
KEYS = (GAVE_UP, LEFT)


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
    """A thread that watches the one that created it, while this exchanges objects or works on batches.

    Progress is another batch or another exchange. After a period without progress, the watch logs the stack; the next
    time, after at least twice as long. If another rank gave up on the hyperparameters and left, the watch ends this
    process with status 0 after ten seconds without progress: a collective would wait for that rank.

    Attributes:
        exchanges: number of completed exchanges.
        awaited: the missing ranks of the current exchange.
        describe_progress: returns the batches for messages, for example ``"after 12 batches"``.
        gave_up: another rank that gave up on the hyperparameters, with the reason, as far as this rank has polled.
    """

    def __init__(self, rank: int, size: int, store: Store, notice_s: float) -> None:
        self.exchanges = 0
        self.awaited: Collection[int] = ()
        self.describe_progress: Callable[[], str] = str
        self.gave_up = ""
        self._ends = False
        self._rank = rank
        self._store = store
        self._tick_s = min(_TICK_S, notice_s / 6 or _TICK_S) * max(1.0, size / 64)
        self._is_in_batches = False
        self._seen: object = None
        self._seen_first_s = 0.0
        self._log_after_s = notice_s
        self._watched = threading.get_ident()
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

    def poll(self) -> None:
        """Update :attr:`gave_up`."""
        polled = (look(self._store, GAVE_UP) or b"").decode()
        self.gave_up = "" if polled.startswith(f"rank {self._rank} ") else polled

    def _watch(self) -> None:
        while not self._stopping.wait(self._tick_s):
            with contextlib.suppress(RuntimeError):  # the store is gone, and what was polled before counts
                self.poll()
                self._ends = bool(self.gave_up and look(self._store, LEFT))
            self._look()

    def _look(self) -> None:
        """Log the stack after a period without progress, or end the process; a new reason restarts the period."""
        now = time.monotonic()
        progress = self.describe_progress()
        seen = (self.exchanges, progress, self._ends)
        if seen != self._seen or not (self._is_in_batches or self.awaited):
            self._seen, self._seen_first_s = seen, now
        still_s = now - self._seen_first_s
        if self._ends and self._is_in_batches and still_s >= _END_AFTER_GIVING_UP_S:
            self._end(still_s)
        if 0 < self._log_after_s <= still_s:
            self._log_after_s = 2 * still_s
            did = f"waited {still_s:.0f} s for {name_ranks(self.awaited)}" if self.awaited else _on_a_batch(still_s)
            logger.warning("Rank %d has %s%s:\n%s", self._rank, did, progress and f", {progress}", self._format_stack())

    def _end(self, still_s: float) -> None:
        """Print the reason and the stack, and end this process."""
        rank = f"Rank {self._rank} (process {os.getpid()})"
        end = f"has since {_on_a_batch(still_s)}, and ends without saving"
        print_at_once(f"det_lightning: {self.gave_up}. {rank} {end}:\n{self._format_stack()}\n")
        os._exit(0)

    def _format_stack(self) -> str:
        frame = sys._current_frames().get(self._watched)  # the documented way, in spite of its name
        return "".join(traceback.format_stack(frame, _SHOWN_FRAMES) if frame else ()).rstrip()


def _on_a_batch(still_s: float) -> str:
    return f"spent {still_s:.0f} s on a batch"


# How long a closed chief keeps running the store: until other ranks finish, or after a failure have read the reason.
_LINGER_S = 30.0
_LINGER_AFTER_FAILURE_S = 5.0
_GRACE_S = 2.0
_CLOSED = "its context was closed"
# torchrun takes the first failure for the cause of all. torchrun looks ten times a second, and a process needs time to
# end.
_HEAD_START_S = 3.0
# Part of gloo's message if the process at the other end of a connection has ended.
_OF_LOST_CONNECTIONS = "gloo/transport/"


class Session:
    """The common keys of all ranks of a run in a store, from the rendezvous until the last rank leaves.

    Rank 0 draws the name of the session at random, so old keys of another context, or of the same run before a restart,
    are never seen. ``on_leave`` functions are called with the reason when this rank leaves.
    """

    def __init__(self, address: StoreAddress, rank: int, size: int, timeout_s: float) -> None:
        notice_s = notice_period_s()  # raises for a wrong value before other ranks are met
        self.address = address
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.longest_pause_s = LONGEST_PAUSE_S * max(1.0, size / 64)
        self.on_leave: list[Callable[[str], None]] = []
        self._reason_left: str | None = None
        self._has_failed = False
        self._process = os.getpid()
        self._serves = address.of_chief and rank == 0
        with self.name_lost_store():
            self._shared_store = self._connect()
            name = self._admit_others() if rank == 0 else self._join()
        store = within(self._shared_store, name)
        self._store: Store | None = store
        self.watch = ProgressWatch(rank, size, store, notice_s)
        _open.add(self)

    @property
    def store(self) -> Store:
        """The keys of this session; a RuntimeError if this rank has left."""
        if self._store is None:
            raise RuntimeError(
                f"This DistributedContext of rank {self.rank} no longer exchanges anything: {self._reason_left}."
            )
        return self._store

    @contextlib.contextmanager
    def name_lost_store(self) -> Iterator[None]:
        """Turn a lost connection inside the block into a RuntimeError that names the store."""
        try:
            yield
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"Rank {self.rank} has lost the store at {self.address}: its process has probably ended; "
                f"look for an earlier error there. ({str(error).splitlines()[0]})"
            ) from error

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Stop taking part in exchanges and notify the other ranks; a second call does nothing.

        After a failure other ranks may never leave, so this rank waits for a shorter time.
        """
        if self._reason_left is not None:
            return
        self._reason_left = reason
        _open.discard(self)
        if os.getpid() != self._process:
            return  # a fork must not use its parent's connection
        self.watch.stop()
        with contextlib.suppress(RuntimeError):  # the store is lost, and what was polled before counts
            self.watch.poll()
        everyone_left = False
        # An error here means that nobody is left to notify, or that the connection failed.
        with contextlib.suppress(RuntimeError):
            for notify in self.on_leave:
                notify(reason)
            everyone_left = self.store.add(LEFT, 1) == self.size
            if everyone_left and self.address.of_chief and not self._serves:
                self.store.set("empty", b"")
            elif everyone_left:
                _delete_session(self.store)
        if self._serves and not everyone_left:
            longest_s = _LINGER_AFTER_FAILURE_S if failed else _LINGER_S
            if threading.main_thread().is_alive():
                threading.Thread(target=_linger, args=(self.store, longest_s), name="det_lightning-store").start()
            else:  # the interpreter is ending, and would not wait for a thread
                _linger(self.store, longest_s)
        self._store = None
        del self._shared_store

    def give_up(self, error: errors.InvalidHP) -> None:
        """Tell the other ranks that this rank gives up on the hyperparameters, for when an exchange fails there."""
        said = f"rank {self.rank} gave up on the hyperparameters (InvalidHP): {error}"
        with contextlib.suppress(RuntimeError):  # nobody is left to notify
            self.store.set(GAVE_UP, said.encode())

    def forget_giving_up(self) -> None:
        """Take back :meth:`give_up`: all ranks have reached the end of a run, and may go on."""
        with contextlib.suppress(RuntimeError):  # the next exchange reports a lost store
            self.store.delete_key(GAVE_UP)

    def fail(self, error: BaseException) -> None:
        """Leave because of an error, and make torchrun name the rank that failed first."""
        if self._has_failed or self._reason_left == _CLOSED or os.getpid() != self._process:
            return
        self._has_failed = True
        if isinstance(error, errors.InvalidHP):
            self.give_up(error)
        failed = isinstance(error, Exception) and not isinstance(error, errors.InvalidHP | errors.ShouldExit)
        # After a failed exchange this rank has left; a lost connection means that another process has ended.
        follows = self._store is None or isinstance(error, dist.DistError) or _OF_LOST_CONNECTIONS in str(error)
        if failed and not follows:
            _record_for_torchrun(error)
        self.leave(f"it has failed with {type(error).__name__}: {error}", failed=True)
        if failed and follows and not self.watch.gave_up:
            _record_for_torchrun(error, after_s=_HEAD_START_S)

    def close(self) -> None:
        """Leave without an error."""
        self.leave(_CLOSED)

    def _connect(self) -> Store:
        store = serve(self.address) if self._serves else reach(self.address, self.rank, self.timeout_s)
        return within(store, "det_lightning")

    def _admit_others(self) -> str:
        """Send the name of this session to every other rank, and wait until all have joined."""
        store = self._shared_store
        name = secrets.token_hex(8)
        absent = set(range(1, self.size))
        answered = set[tuple[int, str]]()
        for _ in pauses(self.timeout_s):
            for rank in sorted(absent):
                if look(store, f"joined/{name}/{rank}") is not None:
                    absent.discard(rank)
                elif (found := look(store, f"request/{rank}")) and (rank, nonce := found.decode()) not in answered:
                    # The request may be from an earlier run; then another one follows.
                    store.set(f"reply/{nonce}", name.encode())
                    answered.add((rank, nonce))
            if not absent:
                break
        problem = ""
        if absent:
            problem = (
                f"Rank 0 has waited {self.timeout_s:g} s at the store at {self.address}, for "
                f"{name_ranks(sorted(absent))} of {self.size}, which did not come. Check that {self.size} processes "
                "were started, and that all can reach this address."
            )
        store.set(f"{name}/met", problem.encode())
        if problem:
            raise RuntimeError(problem)
        for rank, nonce in answered:
            for key in (f"request/{rank}", f"joined/{name}/{rank}", f"reply/{nonce}"):
                store.delete_key(key)
        return name

    def _join(self) -> str:
        """Get the name of the session from rank 0."""
        for waited in pauses(self.timeout_s):
            try:
                return self._request_name(self.timeout_s - waited)
            except dist.DistNetworkError:
                # The store belonged to an earlier context, which rank 0 had not yet shut down.
                self._shared_store = self._connect()
        raise RuntimeError(f"Rank {self.rank} has lost the store at {self.address} several times.")

    def _request_name(self, timeout_s: float) -> str:
        nonce = secrets.token_hex(8)
        self._shared_store.set(f"request/{self.rank}", nonce.encode())
        name = self._answer(f"reply/{nonce}", timeout_s).decode()
        self._shared_store.set(f"joined/{name}/{self.rank}", b"")
        # Rank 0 knows best who is missing.
        if problem := self._answer(f"{name}/met", timeout_s + _GRACE_S).decode():
            raise RuntimeError(problem)
        return name

    def _answer(self, key: str, timeout_s: float) -> bytes:
        for _ in pauses(timeout_s, self.longest_pause_s):
            if (found := look(self._shared_store, key)) is not None:
                return found
        raise RuntimeError(
            f"Rank {self.rank} has waited {self.timeout_s:g} s at the store at {self.address}, for rank 0, which did "
            "not answer."
        )


_open: set[Session] = set()


@atexit.register
def _leave_all() -> None:
    for session in list(_open):
        session.leave("its process has ended without close()")


def _record_for_torchrun(error: BaseException, after_s: float = 0.0) -> None:
    """Write an error into torchrun's error file, if torchrun started this process."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        time.sleep(after_s)
        get_error_handler().record_exception(error)


def _delete_session(store: Store) -> None:
    for key in ("empty", "met", *KEYS):
        store.delete_key(key)


def _linger(store: Store, longest_s: float) -> None:
    """Keep this process's store until the last rank has left, or for ``longest_s``."""
    with contextlib.suppress(RuntimeError):
        for _ in pauses(longest_s):
            if look(store, "empty") is not None:
                _delete_session(store)
                return
