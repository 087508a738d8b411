"""Exchanges of Python objects among a group of ranks, over the store of their session.

The object collectives of a process group would not do: where a rank is missing, has left, or calls another operation,
they wait for the timeout of the group and name nobody, and they must not cross the collectives of a backward pass.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from det_lightning.core._rank_status import name_ranks
from det_lightning.core._session import Session
from det_lightning.core._store import Store, look, pauses

# The store refuses values of more than 8 MiB; small ones travel along with the name of the operation.
_PART_BYTES = 4 << 20
_INLINE_BYTES = 1024
_LOOK_AROUND_S = 1.0
_ALARM = b"!"  # no pickle starts with it


@dataclasses.dataclass(frozen=True)
class _Contribution:
    """The part of one rank in a round: the operation that it calls, and its pickle, inline or in parts."""

    index: int
    operation: str
    parts: int
    inline: bytes


class Exchange:
    """Numbered rounds among the ranks ``members``, the first being the chief; each must take part in every round.

    In a round each rank appends its contribution to one key and counts itself. The last one to come publishes all
    contributions under another key, which the others poll; equal ones of neighbours once, so that what each rank reads
    does not grow with their number where all say the same. Every rank sees which operation each has called, so
    differing calls raise on every rank. The keys of a round are deleted when the next one is complete, large objects
    when all have read them. A rank that leaves puts an alarm under the key that the others would poll next.
    ``name`` is the prefix of the group's keys, ``suffix`` that of its operations' names, ``_local`` on a node.
    """

    def __init__(self, session: Session, name: str, suffix: str, members: Sequence[int]) -> None:
        self._session = session
        self._name = name
        self._suffix = suffix
        self._members = list(members)
        self._index = self._members.index(session.rank)
        session.rounds[name] = 0
        session.on_leave.append(self._notify)

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return all objects, in the order of the group, on its chief; None elsewhere."""
        if self._index == 0:
            found = self._run("gather", b"", range(1, len(self._members)))
            return [stuff, *map(pickle.loads, found)]
        self._run("gather", pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL), ())
        return None

    def allgather(self, stuff: Any, operation: str = "allgather") -> list[Any]:
        """Return all objects, in the order of the group; they are copies, but for the chief's own one on the chief."""
        found = self._run(operation, pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL), range(len(self._members)))
        if self._index == 0:
            return [stuff, *map(pickle.loads, found[1:])]
        return [pickle.loads(pickled) for pickled in found]

    def broadcast(self, stuff: Any) -> Any:
        """Return the chief's object."""
        if self._index == 0:
            self._run("broadcast", pickle.dumps(stuff, pickle.HIGHEST_PROTOCOL), ())
            return stuff
        (found,) = self._run("broadcast", b"", (0,))
        return pickle.loads(found)

    @property
    def _round(self) -> int:
        return self._session.rounds[self._name]

    def _notify(self, reason: str) -> None:
        """Wake the ranks that wait for this one, now or in the next round, and delete the group's keys as the last."""
        store = self._session.store
        rank = self._session.rank
        store.delete_key(f"waiting/{rank}")
        alarm = _ALARM + f"rank {rank} takes part no more, since {reason}".encode()
        # The present round may have been joined already, if that is what failed.
        for number in (self._round, self._round + 1):
            store.compare_set(self._key("all", number), "", alarm)
        if store.add(f"{self._name}/left", 1) == len(self._members):
            for number in range(max(self._round - 1, 0), self._round + 2):
                self._delete_round(store, number)
            for key in (f"{self._name}/left", f"{self._name}/came"):
                store.delete_key(key)

    def _run(self, operation: str, pickled: bytes, wanted: Iterable[int]) -> list[bytes]:
        """Take part in the next round, and return the pickles of the wanted members."""
        session = self._session
        store = self._session.store
        operation = operation + self._suffix
        try:
            with session.naming_a_lost_store():
                self._contribute(store, operation, pickled)
                contributions = self._wait_for_all(store, operation)
                self._check_same_operation(contributions)
                found = [self._read(store, contributions[index]) for index in wanted]
                self._release(store, contributions)
        except BaseException as error:
            session.leave(f"its {operation}() failed: {error or type(error).__name__}", failed=True)
            raise
        session.rounds[self._name] += 1
        return found

    def _contribute(self, store: Store, operation: str, pickled: bytes) -> None:
        size = len(pickled)
        inline = pickled
        parts = 0
        if size > _INLINE_BYTES:
            inline = b""
            for parts, start in enumerate(range(0, size, _PART_BYTES), 1):
                store.set(self._part(self._index, parts), pickled[start : start + _PART_BYTES])
        contribution = _Contribution(self._index, operation, parts, inline)
        store.append(self._key("each"), pickle.dumps(dataclasses.astuple(contribution)))
        if store.add(f"{self._name}/came", 1) == len(self._members) * (self._round + 1):
            store.set(self._key("all"), _condense(_read_contributions(look(store, self._key("each")) or b"")))
            # All have come to this round, so none reads the one before.
            if self._round:
                self._delete_round(store, self._round - 1)

    def _wait_for_all(self, store: Store, operation: str) -> list[_Contribution]:
        session = self._session
        looks = 0
        for waited in pauses(session.timeout_s, session.longest_pause_s):
            if found := look(store, self._key("all")):
                break
            if waited > (looks + 1) * _LOOK_AROUND_S:
                looks += 1
                self._look_for_deadlock(store, operation)
        else:
            self._raise_for_missing(store, operation)
            found = store.get(self._key("all"))  # the last one has come after all
        if looks:
            session.awaited = ()
            store.delete_key(f"waiting/{session.rank}")
        if found.startswith(_ALARM):
            raise RuntimeError(f"Rank {session.rank} is in {operation}(), but {found.removeprefix(_ALARM).decode()}.")
        return _expand(found)

    def _look_for_deadlock(self, store: Store, operation: str) -> None:
        """Raise if a missing rank waits for this one in another group; note in the store where this one waits."""
        store.set(f"waiting/{self._session.rank}", f"{self._name} {self._round} {operation}".encode())
        self._session.awaited = missing = self._missing(store)
        for rank, (name, number, other) in self._waiting_elsewhere(store, missing).items():
            if name != self._name and self._session.rounds.get(name, number + 1) <= number:
                raise RuntimeError(
                    f"Rank {self._session.rank} waits for rank {rank} in {operation}(), and rank {rank} for it in "
                    f"{other}(). All ranks must call the same operations in the same order."
                )

    def _waiting_elsewhere(self, store: Store, missing: list[int]) -> dict[int, tuple[str, int, str]]:
        """Return the group, round and operation of each of the ``missing`` ranks that waits elsewhere."""
        waiting = {}
        for rank in missing:
            if found := look(store, f"waiting/{rank}"):
                name, number, operation = found.decode().split()
                waiting[rank] = (name, int(number), operation)
        return waiting

    def _missing(self, store: Store) -> list[int]:
        came = {found.index for found in _read_contributions(look(store, self._key("each")) or b"")}
        return [rank for index, rank in enumerate(self._members) if index not in came]

    def _raise_for_missing(self, store: Store, operation: str) -> None:
        missing = self._missing(store)
        if not missing:
            return
        waiting = self._waiting_elsewhere(store, missing)
        came = sorted(set(self._members).difference(missing))
        elsewhere = "".join(f" Rank {rank} waits in {other}()." for rank, (_, _, other) in waiting.items())
        raise RuntimeError(
            f"{operation}() of {name_ranks(came)} has waited {self._session.timeout_s:g} s for {name_ranks(missing)}."
            f"{elsewhere} A rank that does not come has died, hangs, or calls something else; timeout_s= of "
            "DistributedContext sets how long to wait."
        )

    def _check_same_operation(self, contributions: list[_Contribution]) -> None:
        if len({found.operation for found in contributions}) > 1:
            calls = ", ".join(f"rank {self._members[found.index]} {found.operation}()" for found in contributions)
            raise RuntimeError(f"The ranks call different operations, where all must call the same: {calls}.")

    def _read(self, store: Store, contribution: _Contribution) -> bytes:
        if not contribution.parts:
            return contribution.inline
        parts = range(1, contribution.parts + 1)
        return b"".join(store.get(self._part(contribution.index, part)) for part in parts)

    def _release(self, store: Store, contributions: list[_Contribution]) -> None:
        """Count this rank as one that has read the large objects; the last one deletes them."""
        in_parts = [found for found in contributions if found.parts]
        if in_parts and store.add(self._key("read"), 1) == len(self._members):
            for found in in_parts:
                for part in range(1, found.parts + 1):
                    store.delete_key(self._part(found.index, part))
            store.delete_key(self._key("read"))

    def _delete_round(self, store: Store, number: int) -> None:
        store.delete_key(self._key("each", number))
        store.delete_key(self._key("all", number))

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{self._name}/{self._round if number is None else number}/{what}"

    def _part(self, index: int, part: int) -> str:
        return self._key(f"part/{index}/{part}")


def _read_contributions(appended: bytes) -> list[_Contribution]:
    """Read the contributions of one key, in the order of the group."""
    stream = io.BytesIO(appended)
    found = []
    while stream.tell() < len(appended):
        found.append(_Contribution(*pickle.load(stream)))
    return sorted(found, key=lambda contribution: contribution.index)


def _condense(contributions: list[_Contribution]) -> bytes:
    """Return contributions, in the order of the group, as a pickle that has equal ones of neighbours once."""

    def content(one: _Contribution) -> tuple[str, int, bytes, int]:
        # Those in parts are under keys of their own.
        return one.operation, one.parts, one.inline, one.index if one.parts else 0

    runs = [[*members] for _, members in itertools.groupby(contributions, content)]
    return pickle.dumps([(dataclasses.astuple(members[0]), len(members)) for members in runs], pickle.HIGHEST_PROTOCOL)


def _expand(condensed: bytes) -> list[_Contribution]:
    """Return the contributions of :func:`_condense`."""
    firsts = [(_Contribution(*fields), count) for fields, count in pickle.loads(condensed)]
    return [
        dataclasses.replace(first, index=first.index + offset) for first, count in firsts for offset in range(count)
    ]
