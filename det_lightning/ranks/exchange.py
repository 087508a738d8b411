"""Exchanges of Python objects among a group of ranks, over the store of a session.

The object collectives of a process group will not do: if a rank is missing, has left, or calls another operation, they
wait for the group's timeout and name no rank. Also, object collectives must not interleave with the collectives of a
backward pass. The engine, which does not call them then, lets the ranks meet here before each of its collectives, and
does nothing that may fail between the two.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from det_lightning.ranks.session import Session, name_ranks
from det_lightning.ranks.store import Store, look, pauses

# The store refuses values of more than 8 MiB; small ones are sent along with the name of the operation.
_PART_BYTES = 4 << 20
_INLINE_BYTES = 1024
_LOOK_AROUND_S = 1.0
_ALARM = b"!"  # no pickle starts with it


class Contribution(NamedTuple):
    """The contribution of a rank to a round: the name of the operation, and a pickle, inline or in parts."""

    member: int
    operation: str
    parts: int
    inline: bytes


class Exchange:
    """Numbered rounds among the ranks ``members``, the first being the chief; each must take part in every round.

    In a round each rank appends a contribution to a common key and increments a counter. The last rank publishes all
    contributions under another key, polled by the other ranks. Equal contributions are published only once, so the
    result stays short for many ranks. Every rank sees the operation of each other rank, so differing calls raise
    everywhere. The keys of a round are deleted when the next round is complete, large objects once all ranks have read
    the objects. A rank that leaves puts an alarm under the key that the other ranks would poll next.
    ``name`` is the prefix of the group's keys, ``suffix`` is added to the names of operations: ``_local`` on a node.
    """

    def __init__(self, session: Session, name: str, suffix: str, members: Sequence[int]) -> None:
        self._session = session
        self._name = name
        self._suffix = suffix
        self._members = list(members)
        self._index = self._members.index(session.rank)
        self._round = 0
        session.on_leave.append(self._notify)

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return all objects, in the order of the group, on the chief; None elsewhere."""
        if self._index == 0:
            found = self._take_part("gather", b"", range(1, len(self._members)))
            return [stuff, *map(pickle.loads, found)]
        self._take_part("gather", pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL), ())
        return None

    def allgather(self, stuff: Any, operation: str = "allgather") -> list[Any]:
        """Return all objects, in the order of the group: copies, except the chief's own object on the chief."""
        found = self._take_part(operation, pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL), range(len(self._members)))
        if self._index == 0:
            return [stuff, *map(pickle.loads, found[1:])]
        return [pickle.loads(pickled) for pickled in found]

    def broadcast(self, stuff: Any) -> Any:
        """Return the chief's object."""
        if self._index == 0:
            self._take_part("broadcast", pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL), ())
            return stuff
        (found,) = self._take_part("broadcast", b"", (0,))
        return pickle.loads(found)

    def meet(self, timeout_s: float, reason: str) -> bool:
        """Return whether all members call this within ``timeout_s``; if not, leave the session for ``reason``."""
        try:
            self._take_part("meet", b"", (), timeout_s, reason)
        except RuntimeError:
            return False
        return True

    @property
    def _store(self) -> Store:
        return self._session.store

    def _notify(self, reason: str) -> None:
        """Wake the waiting ranks, now or in the next round; the last rank to leave deletes the group's keys."""
        store = self._store
        alarm = _ALARM + f"rank {self._session.rank} takes part no more, since {reason}".encode()
        # This rank may have joined the current round already, if the round failed.
        for number in (self._round, self._round + 1):
            store.compare_set(self._key("all", number), "", alarm)
        if store.add(f"{self._name}/left", 1) == len(self._members):
            for number in range(max(self._round - 1, 0), self._round + 2):
                self._delete_round(number)
            for key in (f"{self._name}/left", f"{self._name}/came"):
                store.delete_key(key)

    def _take_part(
        self, operation: str, pickled: bytes, wanted: Iterable[int], timeout_s: float | None = None, reason: str = ""
    ) -> list[bytes]:
        """Take part in the next round, and return the pickles of the wanted members; ``reason`` is for leaving."""
        operation += self._suffix
        try:
            with self._session.name_lost_store():
                self._contribute(operation, pickled)
                contributions = self._wait_for_all(operation, timeout_s or self._session.timeout_s)
                self._check_same_operation(contributions)
                chosen = [contributions[index] for index in wanted]
                found = [one.inline + b"".join(map(self._store.get, self._part_keys(one))) for one in chosen]
                self._release(contributions)
        except BaseException as error:
            reason = reason or f"its {operation}() failed: {error or type(error).__name__}"
            self._session.leave(reason, failed=True)
            raise
        self._round += 1
        self._session.watch.exchanges += 1
        return found

    def _contribute(self, operation: str, pickled: bytes) -> None:
        store = self._store
        own = Contribution(self._index, operation, 0, pickled)
        if len(pickled) > _INLINE_BYTES:
            own = Contribution(self._index, operation, math.ceil(len(pickled) / _PART_BYTES), b"")
        for number, key in enumerate(self._part_keys(own)):
            store.set(key, pickled[number * _PART_BYTES : (number + 1) * _PART_BYTES])
        store.append(self._key("each"), pickle.dumps(tuple(own)))
        if store.add(f"{self._name}/came", 1) == len(self._members) * (self._round + 1):
            # A pickle holds equal entries only once, if they are the same object.
            entries: dict[tuple[object, ...], tuple[object, ...]] = {}
            came = [entries.setdefault(one[1:], one[1:]) for one in self._read_own_round()]
            store.set(self._key("all"), pickle.dumps(came, pickle.HIGHEST_PROTOCOL))
            # All have come to this round, so none still reads the previous one.
            if self._round:
                self._delete_round(self._round - 1)

    def _wait_for_all(self, operation: str, timeout_s: float) -> list[Contribution]:
        """Return the contributions of all members; raise a RuntimeError if one has left, or does not come in time."""
        looks = 0
        for waited in pauses(timeout_s, self._session.longest_pause_s):
            if (found := look(self._store, self._key("all"))) is not None:
                break
            if waited > (looks + 1) * _LOOK_AROUND_S:
                looks += 1
                self._find_missing()
        else:
            self._raise_for_missing(operation)
            found = self._store.get(self._key("all"))  # the last rank has come after all
        self._session.watch.awaited = ()
        if found.startswith(_ALARM):
            reason = found.removeprefix(_ALARM).decode()
            raise RuntimeError(f"Rank {self._session.rank} is in {operation}(), but {reason}.")
        return [Contribution(member, *entry) for member, entry in enumerate(pickle.loads(found))]

    def _find_missing(self) -> list[int]:
        """Return the ranks that have not come, and note them for the watch."""
        came = {found.member for found in self._read_own_round()}
        missing = [rank for index, rank in enumerate(self._members) if index not in came]
        self._session.watch.awaited = missing
        return missing

    def _read_own_round(self) -> list[Contribution]:
        appended = look(self._store, self._key("each")) or b""
        stream = io.BytesIO(appended)
        found = []
        while stream.tell() < len(appended):
            found.append(Contribution(*pickle.load(stream)))
        return sorted(found)

    def _raise_for_missing(self, operation: str) -> None:
        missing = self._find_missing()
        if not missing:
            return
        came = sorted(set(self._members).difference(missing))
        raise RuntimeError(
            f"{operation}() of {name_ranks(came)} has waited {self._session.timeout_s:g} s for {name_ranks(missing)}. "
            "A rank that does not come has died, hangs, or calls something else; timeout_s= of "
            "DistributedContext sets how long to wait."
        )

    def _check_same_operation(self, contributions: list[Contribution]) -> None:
        if len({found.operation for found in contributions}) > 1:
            calls = ", ".join(f"rank {self._members[found.member]} {found.operation}()" for found in contributions)
            raise RuntimeError(f"All ranks must call the same operation; got {calls}.")

    def _release(self, contributions: list[Contribution]) -> None:
        """Count this rank as a reader of the large objects; the last reader deletes them."""
        keys = [key for found in contributions for key in self._part_keys(found)]
        if keys and self._store.add(self._key("read"), 1) == len(self._members):
            for key in [*keys, self._key("read")]:
                self._store.delete_key(key)

    def _delete_round(self, number: int) -> None:
        for what in ("each", "all"):
            self._store.delete_key(self._key(what, number))

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{self._name}/{self._round if number is None else number}/{what}"

    def _part_keys(self, contribution: Contribution) -> list[str]:
        return [self._key(f"part/{contribution.member}/{number}") for number in range(contribution.parts)]
