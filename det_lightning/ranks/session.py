"""The session of the ranks of a run: the rendezvous at a store, common keys, and the end of each rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from det_lightning import errors
from det_lightning.ranks.store import LONGEST_PAUSE_S, Store, StoreAddress, look, pauses, reach, serve, within
from det_lightning.ranks.watch import GAVE_UP, KEYS, LEFT, ProgressWatch, name_ranks, notice_period_s

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
        with contextlib.suppress(RuntimeError):  # the store is lost, and what was heard before counts
            self.watch.hear()
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
        was_asked_to_end = not isinstance(error, Exception) or isinstance(error, errors.InvalidHP | errors.ShouldExit)
        failed = not was_asked_to_end and not self.watch.ending  # torchrun reports the signal
        is_first = failed and self._fails_first(error)
        if is_first:
            _record_for_torchrun(error)
        self.leave(f"it has failed with {type(error).__name__}: {error}", failed=True)
        if failed and not is_first and not self.watch.gave_up:
            _record_for_torchrun(error, after_s=_HEAD_START_S)

    def _fails_first(self, error: BaseException) -> bool:
        """Return whether no other rank of the run has failed before, or may have."""
        # After a failed exchange this rank has left; a lost connection means that another process has ended.
        if self._store is None or isinstance(error, dist.DistError) or _OF_LOST_CONNECTIONS in str(error):
            return False
        own = str(self.rank).encode()
        try:
            return self._store.compare_set("failed", "", own) == own
        except RuntimeError:  # the store is lost, together with the server's process
            return False

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
    for key in ("empty", "met", "failed", *KEYS):
        store.delete_key(key)


def _linger(store: Store, longest_s: float) -> None:
    """Keep this process's store until the last rank has left, or for ``longest_s``."""
    with contextlib.suppress(RuntimeError):
        for _ in pauses(longest_s):
            if look(store, "empty") is not None:
                _delete_session(store)
                return
