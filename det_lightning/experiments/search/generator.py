"""The random generator of Determined's searches: numpy's legacy generator."""

from __future__ import annotations

import random

_WORDS = 624
_MAX_WORD = 0xFFFFFFFF


class Generator:
    """The draws of ``numpy.random.RandomState(seed)``, without numpy.

    Python's own generator is the same Mersenne Twister, with another seeding and another way to draw integers.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed <= _MAX_WORD:
            raise ValueError(f"experiment_seed must be from 0 to 2**32 - 1; got {seed}.")
        words = [seed]
        for position in range(1, _WORDS):
            previous = words[-1]
            words.append((1812433253 * (previous ^ (previous >> 30)) + position) & _MAX_WORD)
        self._twister = random.Random()
        self._twister.setstate((3, (*words, _WORDS), None))

    def word(self) -> int:
        """Return the next 32 random bits."""
        return self._twister.getrandbits(32)

    def below(self, limit: int) -> int:
        """Return an integer in [0, limit), like ``RandomState.randint(0, limit)``; a limit of 1 draws nothing."""
        largest = limit - 1
        if largest == 0:
            return 0
        mask = (1 << largest.bit_length()) - 1
        while True:
            drawn = self.word()
            if largest > _MAX_WORD:
                drawn = (drawn << 32) | self.word()
            if drawn & mask <= largest:
                return drawn & mask

    def uniform(self, low: float, high: float) -> float:
        """Return a float in [low, high)."""
        return low + (high - low) * self._twister.random()
