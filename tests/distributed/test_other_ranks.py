"""A run goes on with another number of processes: at the same batch, with the samples of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from det_lightning.checkpoint import CheckpointContent, ResumeState, TrialState
from det_lightning.pytorch._position import DealtBatchSampler, GlobalBatch, continue_batches
from tests.launching import TORCHRUN, environment
from tests.warm_python import start_warm_python

#: The launches: how many ranks, then runs with the number of batches at their ends.
LAUNCHES = [
    (1, ["undisturbed1", "24", "from1", "9"]),
    (2, ["undisturbed2", "24", "from2", "9", "from1", "15"]),
    (3, ["from1", "20", "from2", "15"]),
    (1, ["from1", "24", "from2", "24"]),
]
ENDS = {"from1": (9, 15, 20, 24), "from2": (9, 15, 24)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the chiefs of all trainings wrote."""
    folder = tmp_path_factory.mktemp("other_ranks")
    for ranks, runs in LAUNCHES:
        launcher = [start_warm_python().executable, *TORCHRUN[:-1], str(ranks), "-m", "tests.distributed.other_ranks"]
        done = subprocess.run(
            [*launcher, str(folder), *runs], capture_output=True, text=True, timeout=400, env=environment(), cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def compare(folder: Path, trial: str, run: str) -> tuple[list[int], bool, list[str]]:
    """Return the batches whose samples differ from the undisturbed run's, whether the weights agree, and warnings."""
    whole = read(folder, f"{trial}-undisturbed{run[-1]}-24")
    parts = [read(folder, f"{trial}-{run}-{end}") for end in ENDS[run]]
    seen = {index: samples for part in parts for index, samples in part["seen"].items()}
    differ = [int(index) for index, samples in whole["seen"].items() if seen.get(index) != samples]
    pairs = zip(whole["weights"], parts[-1]["weights"], strict=True)
    agree = all(torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-9) for one, other in pairs)
    return differ, agree, [notice for part in parts for notice in part["notices"]]


@pytest.mark.slow
@pytest.mark.parametrize("run", ENDS)
@pytest.mark.parametrize("trial", ["Regression", "Aggregating", "Dropping", "Prefetching", "Reproducible"])
def test_other_ranks_train_on_the_same_samples_to_the_same_weights(folder: Path, trial: str, run: str) -> None:
    differ, agree, notices = compare(folder, trial, run)
    assert differ == [], "batches with other samples"
    assert agree, "other weights"
    assert notices == []


@pytest.mark.slow
def test_a_partial_batch_has_the_same_samples_where_they_do_not_divide(folder: Path) -> None:
    differ, _, notices = compare(folder, "Partial", "from1")
    assert differ == []
    assert [notice.split(": ")[1].split(",")[0] for notice in notices] == [
        "the last batch of a pass over the data has 4 samples in place of 12"
    ], "in two processes it has two samples each, and nothing to say"


@pytest.mark.slow
def test_batches_of_a_sampler_of_ones_own_keep_the_position(folder: Path) -> None:
    *_, notices = compare(folder, "OwnBatches", "from1")
    assert [*read(folder, "OwnBatches-from1-15")["seen"]] == [str(i) for i in range(9, 15)]
    assert len(notices) == 3 and "Batches is a batch sampler of your own" in notices[0], "once for each resume"


@pytest.mark.slow
def test_another_global_batch_keeps_the_number_of_samples(folder: Path) -> None:
    seen = read(folder, "FixedShares-from1-15")["seen"]
    assert min(map(int, seen)) == 5, "nine batches of six samples are four and a half of twelve"
    whole = read(folder, "FixedShares-undisturbed1-24")["seen"]
    assert seen["5"] == sorted(whole["10"] + whole["11"]), "of the same order, of which half a batch is left out"
    (notice,) = read(folder, "FixedShares-from1-15")["notices"]
    assert "a batch of all processes had 6 samples and has 12" in notice


@given(
    shares=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    replicas=st.integers(1, 5),
)
def test_dealing_keeps_the_samples_of_each_global_batch(shares: list[int], ranks: int, replicas: int) -> None:
    numbers = itertools.count()
    batches = [[*itertools.islice(numbers, size)] for size in shares]
    dealt = [[*DealtBatchSampler(batches, ranks, replicas, rank)] for rank in range(replicas)]
    for index, parts in enumerate(zip(*dealt, strict=True)):
        whole = [*itertools.chain(*batches[index * ranks : (index + 1) * ranks])]
        assert all(parts) and {*itertools.chain(*parts)} == {*whole}
        if len(whole) >= replicas:
            assert [*itertools.chain(*parts)] == whole
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(len(DealtBatchSampler(batches, ranks, replicas, 0)) == len(of_rank) for of_rank in dealt)


@pytest.mark.parametrize(
    ("before", "now", "equal"),
    [
        (GlobalBatch(1, 32, 256, 32), GlobalBatch(2, 16, 256, 32), True),
        (GlobalBatch(1, 32, 256, 32), GlobalBatch(3, 10, 256, 32), True),  # of which two samples are left out
        (GlobalBatch(3, 10, 256, 32), GlobalBatch(5, 6, 256, 32), True),
        (GlobalBatch(8, 1, 256, 8), GlobalBatch(5, 1, 256, 8), True),
        (GlobalBatch(8, 1, 256, None), GlobalBatch(5, 1, 256, None), False),
        (GlobalBatch(1, 32, 256, None), GlobalBatch(2, 16, 256, None), True),
        (GlobalBatch(1, 16, 256, 32), GlobalBatch(2, 16, 256, 32), False),  # a size written into the loader
        (GlobalBatch(1, 32, 256, 32), GlobalBatch(1, 64, 256, 64), False),
        (GlobalBatch(1, None, None, 32), GlobalBatch(2, None, None, 32), True),
        (GlobalBatch(1, None, None, None), GlobalBatch(2, 16, 256, 32), False),
    ],
)
def test_global_batches_are_compared_by_their_samples(before: GlobalBatch, now: GlobalBatch, equal: bool) -> None:
    assert before.equals(now) is equal is now.equals(before)


@pytest.mark.parametrize(
    ("world_size", "hparams", "now", "continues", "position"),
    [
        (1, {"global_batch_size": 32}, GlobalBatch(2, 16, 256, 32), GlobalBatch(1, 32, 256, 32), 12),
        (2, {"global_batch_size": 32}, GlobalBatch(1, 32, 256, 32), GlobalBatch(2, 16, 256, 32), 12),
        # A size that is fixed in the loader.
        (1, {"global_batch_size": 32}, GlobalBatch(2, 8, 256, 32), GlobalBatch(2, 8, 256, 32), 6),
        (1, {"global_batch_size": 32}, GlobalBatch(1, 64, 256, 64), GlobalBatch(1, 64, 256, 64), 6),
        (1, {}, GlobalBatch(2, 16, 256, 32), GlobalBatch(2, 16, 256, 32), 12),  # unknown
        (None, {}, GlobalBatch(2, 16, 256, 32), GlobalBatch(2, 16, 256, 32), 12),  # written by Determined
        (None, {"global_batch_size": 16}, GlobalBatch(2, 16, 256, 32), GlobalBatch(2, 16, 256, 32), 6),
    ],
)
def test_older_checkpoints_tell_by_hyperparameters(
    world_size: int | None, hparams: dict[str, int], now: GlobalBatch, continues: GlobalBatch, position: int
) -> None:
    resume = None
    if world_size is not None:
        resume = ResumeState({"batches_trained": 12}, [{}], [[]], 12, [], world_size=world_size)
    content = CheckpointContent({}, TrialState(batches_trained=12), {"hparams": hparams}, resume)
    batches = BatchSampler(range(256), now.batch_size or 1, drop_last=False)
    chosen, _ = continue_batches(content, batches, now, warns=False)
    assert (chosen, content.trial_state.batches_trained) == (continues, position)


@pytest.mark.parametrize(
    ("before", "now", "batches", "converted"),
    [
        (GlobalBatch(1, 32, 256), GlobalBatch(1, 64, 256), 5, 3),
        (GlobalBatch(1, 32, 256), GlobalBatch(1, 16, 256), 5, 10),
        (GlobalBatch(1, 16, 256), GlobalBatch(4, 16, 256), 12, 3),
        (GlobalBatch(1, 32, 100), GlobalBatch(1, 64, 100), 40, 20),  # ten epochs of four batches, now of two
        (GlobalBatch(1, 32, 100), GlobalBatch(1, 64, 100), 43, 22),
        (GlobalBatch(1, 16, 112), GlobalBatch(2, 16, 112), 70, 35),  # ten passes, of three batches and a half now
    ],
)
def test_a_position_is_converted_by_samples(
    before: GlobalBatch, now: GlobalBatch, batches: int, converted: int
) -> None:
    assert before.convert(batches, now) == converted
