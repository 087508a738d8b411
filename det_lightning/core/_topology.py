"""Which rank a process is, on which node: the six numbers, and whether they can be."""

from __future__ import annotations

import dataclasses
import os

# The variables of the launchers, in the order of the fields of Place.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
OF_DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process stands."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def problems(self) -> list[str]:
        """Return what cannot be true."""
        found = []
        for index, count in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")):
            if not 0 <= getattr(self, index) < getattr(self, count):
                values = f"{index}={getattr(self, index)}, {count}={getattr(self, count)}"
                found.append(f"{values}: {index} has to be from 0 to {count} - 1")
        # Nodes may have different numbers of processes, but each has one at least.
        others = self.size - self.local_size
        if others < self.cross_size - 1 or (self.cross_size == 1 and others):
            found.append(
                f"size={self.size} processes cannot be local_size={self.local_size} on this node and some on each "
                f"of the others of cross_size={self.cross_size} nodes"
            )
        return found


def checked_place(
    rank: int | None,
    size: int | None,
    local_rank: int | None,
    local_size: int | None,
    cross_rank: int | None,
    cross_size: int | None,
    timeout_s: float,
) -> Place:
    """Return where a process stands; without any numbers it is alone.

    Raises:
        ValueError: some numbers are missing, or they cannot be; names all that is wrong.
    """
    numbers = {
        "rank": rank,
        "size": size,
        "local_rank": local_rank,
        "local_size": local_size,
        "cross_rank": cross_rank,
        "cross_size": cross_size,
    }
    given = {name: number for name, number in numbers.items() if number is not None}
    if 0 < len(given) < len(numbers):
        missing = ", ".join(name for name in numbers if name not in given)
        raise ValueError(
            "DistributedContext needs rank, size, local_rank, local_size, cross_rank and cross_size, or none of them; "
            f"{missing} are missing, and only {', '.join(f'{name}={value}' for name, value in given.items())} given."
        )
    place = Place(**given) if given else Place(0, 1, 0, 1, 0, 1)
    problems = place.problems()
    if not timeout_s > 0:
        problems.append(f"timeout_s={timeout_s!r} has to be above 0")
    if problems:
        raise ValueError(f"DistributedContext cannot be made: {'; '.join(problems)}.")
    return place


def contradictions(places: list[Place]) -> list[str]:
    """Return in what the ranks contradict each other; each place is right by itself."""
    chief = places[0]
    problems = []
    seats: dict[tuple[int, int], int] = {}
    first_on_node: dict[int, Place] = {}
    for place in places:
        neighbour = first_on_node.setdefault(place.cross_rank, place)
        for name, other_place in (("size", chief), ("local_size", neighbour), ("cross_size", chief)):
            mine = getattr(place, name)
            others = getattr(other_place, name)
            if mine != others:
                problems.append(f"rank {place.rank} has {name}={mine}, rank {other_place.rank} has {name}={others}")
        other = seats.setdefault((place.cross_rank, place.local_rank), place.rank)
        if other != place.rank:
            seat = f"cross_rank={place.cross_rank}, local_rank={place.local_rank}"
            problems.append(f"ranks {other} and {place.rank} both have {seat}")
    return problems


def place_in_environment(need: str, names: tuple[str, ...]) -> Place:
    """Read the six numbers from environment variables.

    Args:
        need: begins the message of an error.
        names: of the variables, in the order of the fields of :class:`Place`.

    Raises:
        ValueError: variables are missing or no numbers; names them.
    """
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(f"{need}; {', '.join(missing)} are not in the environment.")
    texts = {name: os.environ[name] for name in names}
    wrong = [f"{name}={text!r}" for name, text in texts.items() if not text.strip().lstrip("-").isdecimal()]
    if wrong:
        raise ValueError(f"{need}; in the environment {', '.join(wrong)} are no numbers.")
    return Place(*(int(text) for text in texts.values()))
