"""Files that would end the process if torch read them: each is read in a process of its own, which says how it ends."""

from __future__ import annotations

import itertools
import pickle
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from det_lightning.checkpoint.safe_load import read_state
from tests.soak import mutations
from tests.soak.mutations import name_of, number, storage_ref, tensor, text, tuple_of
from tests.warm_python import WarmPython

SCRIPT = """
import pathlib, sys, torch
from det_lightning import errors
from det_lightning.checkpoint.safe_load import read_state
for path in sys.argv[1:]:
    try:
        state = read_state(pathlib.Path(path))
    except errors.CheckpointError as e:
        print(f"refused: {e}")
    else:
        # New memory takes the place of what the state should not refer to any more.
        others = [torch.zeros(2**18) for _ in range(40)]
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.sum()
        del state, value
        print("read")
"""


def read_alone(python: WarmPython, *paths: Path) -> list[str]:
    """Return what a process of its own says of each state file."""
    command = [python.executable, "-c", SCRIPT, *map(str, paths)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_view_of_moving_memory_is_refused(tmp_path: Path, warm_python: WarmPython) -> None:
    count = 2**18
    whole = storage_ref(numel=count, old=True)
    view = whole.replace(b"NtQ", tuple_of(number(7), number(0), number(count)) + b"tQ")
    # The first reference makes the view; the second tensor makes its memory move.
    values = {"a": view, "b": tensor(whole, shape=(count * 64,)), "c": tensor(view, shape=(count,))}
    state = b"\x80\x02}(" + b"".join(text(name) + value for name, value in values.items()) + b"u."
    keys = b"\x80\x02}(" + number(7) + text("0") + b"u."
    path = tmp_path / "state.pth"
    head = mutations.made_up_old_file(b"").partition(pickle.dumps([], 2))[0]
    path.write_bytes(head + state + keys + struct.pack("<q", count) + b"A" * 4 * count + b"B" * 64)
    (said,) = read_alone(warm_python, path)
    assert "a reference to a storage has unexpected parts" in said


DEQUE = name_of("collections", "deque") + b"q\x01"
DEEP = 20_000
# What makes a value from a remembered function, with the value inside in the middle.
CHAINS = {
    "deques in lists": (DEQUE, b"h\x01](", b"e\x85R"),
    "default dicts in dicts": (name_of("collections", "defaultdict") + b"q\x01", b"h\x01N}(K\0", b"u\x86R"),
    "lists": (b"N", b"](", b"e"),
    "dicts": (b"N", b"}(K\0", b"u"),
    "slices": (name_of("builtins", "slice") + b"q\x01", b"h\x01(", b"tR"),
    "sets": (name_of("builtins", "frozenset") + b"q\x01", b"h\x01](", b"e\x85R"),
    "namespaces": (name_of("types", "SimpleNamespace") + b"q\x01", b"h\x01)R}(" + text("a"), b"ub"),
    "attributes": (name_of("collections", "OrderedDict") + b"q\x01", b"h\x01)R}(" + text("a"), b"ub"),
    "tensors": (
        name_of("torch", "Tensor") + b"q\x02" + name_of("torch._utils", "_rebuild_parameter_with_state") + b"q\x01",
        b"h\x01(h\x02)R\x89}}" + text("grad"),
        b"stR",
    ),
}


def test_unlimited_nesting_is_refused(tmp_path: Path, warm_python: WarmPython) -> None:
    for name, (prepare, begin, end) in CHAINS.items():
        value = begin * DEEP + b"N" + end * DEEP
        pickled = b"\x80\x02}(" + text("f") + b"(" + prepare + b"t" + text("a") + value + b"u."
        (tmp_path / name).write_bytes(mutations.made_up_archive(pickled))
    said = read_alone(warm_python, *(tmp_path / name for name in CHAINS))
    expected = "its values are nested more than 150 deep"
    assert [name for name, line in zip(CHAINS, said, strict=True) if expected not in line] == []


@pytest.mark.slow
def test_chained_default_factories_are_refused(tmp_path: Path, warm_python: WarmPython) -> None:
    """The outer ones come first, so that the file nests nothing when it makes them."""
    prepare, make = name_of("collections", "defaultdict") + b"q\1", b"h\1)R"
    put, get = b"r%b", b"j%b"
    begin = b"N}q\0" + text("default_factory")
    link = make + put + get + begin + get + b"s\x86b"
    places = [struct.pack("<I", 2 + index) for index in range(1_000_001)]
    links = b"".join(link % (inner, outer, inner) for outer, inner in itertools.pairwise(places))
    pickled = b"\x80\x02}(" + text("f") + prepare + text("a") + b"](" + make + put % places[0] + links + b"eu."
    path = tmp_path / "state.pth"
    path.write_bytes(mutations.made_up_archive(pickled))
    (said,) = read_alone(warm_python, path)
    assert "a collections.defaultdict with a state" in said


def test_nesting_of_a_hundred_is_read(tmp_path: Path) -> None:
    value: object = 1
    for _ in range(35):
        value = {"a": [(value, None)]}
    torch.save({"callbacks": value}, tmp_path / "state.pth")
    assert read_state(tmp_path / "state.pth") == {"callbacks": value}
