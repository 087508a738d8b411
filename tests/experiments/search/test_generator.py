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


@given(
    seed=seeds,
    limits=st.lists(st.sampled_from([1, 2**31, 2**32 - 1, 2**32, 2**32 + 1]) | st.integers(1, 2**63), max_size=20),
)
def test_integers_are_those_of_numpy(seed: int, limits: list[int]) -> None:
    generator = Generator(seed)
    state = np.random.RandomState(seed)
    assert [generator.below(limit) for limit in limits] == [state.randint(0, limit, dtype=np.int64) for limit in limits]


@given(seed=seeds, low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_floats_are_those_of_numpy(seed: int, low: float, width: float) -> None:
    generator = Generator(seed)
    state = np.random.RandomState(seed)
    for _ in range(5):
        assert generator.uniform(low, low + width) == state.uniform(low, low + width)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_of_more_than_32_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"experiment_seed must be from 0 to 2\*\*32 - 1; got {seed}"):
        Generator(seed)
