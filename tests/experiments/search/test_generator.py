"""The random generator draws what numpy's legacy one draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.experiments.search.generator import Generator

seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds)
def test_words_are_those_of_numpy(seed: int) -> None:
    generator = Generator(seed)
    words = np.frombuffer(np.random.RandomState(seed).bytes(4 * 1300), dtype="<u4")
    assert [generator.word() for _ in range(1300)] == words.tolist()


@given(seed=seeds, limits=st.lists(st.one_of(st.integers(1, 100), st.integers(1, 2**63)), max_size=20))
def test_integers_are_those_of_numpy(seed: int, limits: list[int]) -> None:
    generator = Generator(seed)
    state = np.random.RandomState(seed)
    assert [generator.below(limit) for limit in limits] == [state.randint(0, limit, dtype=np.int64) for limit in limits]


@pytest.mark.parametrize("limit", [2**31, 2**32 - 1, 2**32, 2**32 + 1])
def test_integers_around_one_word_are_those_of_numpy(limit: int) -> None:
    generator = Generator(84)
    state = np.random.RandomState(84)
    assert [generator.below(limit) for _ in range(50)] == [state.randint(0, limit, dtype=np.int64) for _ in range(50)]


@given(seed=seeds, low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_floats_are_those_of_numpy(seed: int, low: float, width: float) -> None:
    generator = Generator(seed)
    state = np.random.RandomState(seed)
    assert [generator.uniform(low, low + width) for _ in range(5)] == [
        state.uniform(low, low + width) for _ in range(5)
    ]


def test_one_possibility_draws_nothing() -> None:
    generator = Generator(42)
    assert generator.below(1) == 0
    assert generator.word() == Generator(42).word()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_of_more_than_32_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"experiment_seed must be from 0 to 2\*\*32 - 1; got {seed}"):
        Generator(seed)
