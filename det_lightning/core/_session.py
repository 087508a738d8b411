"""The store over which the ranks of a run exchange objects: reaching it, meeting there, and leaving it."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Protocol, cast

from torch.distributed import DistNetworkError

from det_lightning.core._store import LONGEST_PAUSE_S, Store, StoreAddress, look, pauses, reach, serve, within

# How long a chief that has closed goes on running the store for ranks that have not, so that they can finish; and after
# a failure, so that they can read what happened.
_LINGER_S = 30.0
_LINGER_AFTER_FAILURE_S = 5.0
_GRACE_S = 2.0


class Leaver(Protocol):
    """What tells the other ranks that this one has left."""

    def leave(self, reason: str) -> None: ...


class Session:
    """One meeting of all ranks at a store, with keys of its own.

    The name of the session is drawn anew by rank 0, so keys that an earlier context, or the same run before it was
    restarted, has left in the store are never seen.

    Args:
        address: where the store is.
        rank: this rank.
        size: how many ranks meet.
        timeout_s: how long to wait for the others.

    Raises:
        RuntimeError: the store cannot be started or reached, or not all ranks came; names them.
    """

    def __init__(self, address: StoreAddress, rank: int, size: int, timeout_s: float) -> None:
        self.address = address
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.longest_pause_s = LONGEST_PAUSE_S * max(1.0, size / 64)
        self.groups: dict[str, Leaver] = {}
        self._left: str | None = None
        self._process = os.getpid()
        self._serves = address.of_chief and rank == 0
        with self.naming_a_lost_store():
            self._lobby: Store | None = self._enter_lobby()
            name = self._receive() if rank == 0 else self._ask_in()
        self._store: Store | None = within(self._lobby, name)
        _open.add(self)

    @property
    def store(self) -> Store:
        """The keys of this session.

        Raises:
            RuntimeError: this rank has left.
        """
        if self._store is None:
            raise RuntimeError(f"This DistributedContext of rank {self.rank} exchanges nothing any more: {self._left}.")
        return self._store

    @contextlib.contextmanager
    def naming_a_lost_store(self) -> Iterator[None]:
        """Say in an error of the connection whose it was.

        Raises:
            RuntimeError: the store no longer answers.
        """
        try:
            yield
        except DistNetworkError as error:
            raise RuntimeError(
                f"Rank {self.rank} has lost the store at {self.address}: its process has probably ended; "
                f"look for an earlier error there. ({str(error).splitlines()[0]})"
            ) from error

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Tell the others that this rank takes part in no further exchange; a second call does nothing.

        Args:
            reason: what the others, and later calls on this rank, are told.
            failed: an exchange went wrong, so not all of the others may ever leave.
        """
        if self._left is not None:
            return
        self._left = reason
        _open.discard(self)
        if os.getpid() != self._process:
            return  # a fork has no right to speak on its parent's connection
        everyone_left = False
        # Nobody is left to be told, or the connection is what failed.
        with contextlib.suppress(RuntimeError):
            for group in self.groups.values():
                group.leave(reason)
            everyone_left = self.store.add("left", 1) == self.size
            if everyone_left and self.address.of_chief and not self._serves:
                self.store.set("empty", b"")
            elif everyone_left:
                _delete_session(self.store)
        if self._serves and not everyone_left:
            self._keep_serving(_LINGER_AFTER_FAILURE_S if failed else _LINGER_S)
        self._store = self._lobby = None

    def _keep_serving(self, longest_s: float) -> None:
        """Run the store on until the last rank has read what is in it, which may be after this one has closed."""
        if threading.main_thread().is_alive():
            threading.Thread(target=_linger, args=(self.store, longest_s), name="det_lightning-store").start()
        else:  # the interpreter is ending, and would not wait for a thread
            _linger(self.store, longest_s)

    def _enter_lobby(self) -> Store:
        store = serve(self.address) if self._serves else reach(self.address, self.rank, self.timeout_s)
        return within(store, "det_lightning")

    def _receive(self) -> str:
        """Give every other rank the name of this session, and wait until all have taken it."""
        lobby = cast(Store, self._lobby)
        name = secrets.token_hex(8)
        absent = set(range(1, self.size))
        welcomed = set[tuple[int, str]]()
        for _ in pauses(self.timeout_s):
            for rank in sorted(absent):
                if look(lobby, f"joined/{name}/{rank}") is not None:
                    absent.discard(rank)
                elif (found := look(lobby, f"hello/{rank}")) and (rank, nonce := found.decode()) not in welcomed:
                    # It may be the one of an earlier run; then another one follows.
                    lobby.set(f"welcome/{nonce}", name.encode())
                    welcomed.add((rank, nonce))
            if not absent:
                break
        problem = self._nobody_came(absent) if absent else ""
        lobby.set(f"{name}/met", problem.encode())
        if problem:
            raise RuntimeError(problem)
        for rank, nonce in welcomed:
            for key in (f"hello/{rank}", f"joined/{name}/{rank}", f"welcome/{nonce}"):
                lobby.delete_key(key)
        return name

    def _nobody_came(self, absent: set[int]) -> str:
        return (
            f"Rank 0 has waited {self.timeout_s:g} s at the store at {self.address}, for {_ranks(absent)} of "
            f"{self.size}, which did not come. Were {self.size} processes started, and do all reach that address?"
        )

    def _ask_in(self) -> str:
        """Get the name of the session from rank 0."""
        for waited in pauses(self.timeout_s):
            try:
                return self._asked_in(self.timeout_s - waited)
            except DistNetworkError:
                # The store was the one of an earlier context, which rank 0 had not yet shut down.
                self._lobby = self._enter_lobby()
        raise RuntimeError(f"Rank {self.rank} has lost the store at {self.address} again and again.")

    def _asked_in(self, timeout_s: float) -> str:
        lobby = cast(Store, self._lobby)
        nonce = secrets.token_hex(8)
        lobby.set(f"hello/{self.rank}", nonce.encode())
        name = self._answer(f"welcome/{nonce}", timeout_s).decode()
        lobby.set(f"joined/{name}/{self.rank}", b"")
        # Rank 0 knows best who is missing.
        if problem := self._answer(f"{name}/met", timeout_s + _GRACE_S).decode():
            raise RuntimeError(problem)
        return name

    def _answer(self, key: str, timeout_s: float) -> bytes:
        lobby = cast(Store, self._lobby)
        for _ in pauses(timeout_s, self.longest_pause_s):
            if (found := look(lobby, key)) is not None:
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


def _delete_session(store: Store) -> None:
    for key in ("empty", "left", "met"):
        store.delete_key(key)


def _linger(store: Store, longest_s: float) -> None:
    with contextlib.suppress(RuntimeError):
        for _ in pauses(longest_s):
            if look(store, "empty") is not None:
                _delete_session(store)
                return


def _ranks(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
