"""A small file that asks for much memory or time is refused at once, and large ordinary values are read."""

from __future__ import annotations

import collections
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint.safe_load import read_state
from tests.soak import mutations
from tests.soak.mutations import call, name_of, number, storage_ref, text, tuple_of

# Each file is made to be expensive.
pytestmark = pytest.mark.slow

TIMES = 2000
ENCODE = name_of("_codecs", "encode")
LATIN = text("latin1")
DTYPE = call(name_of("numpy", "dtype"), text("u1"), b"\x89", b"\x88")
CONTENT = call(ENCODE, text("x" * 100_000), LATIN)
HOOKS = (b"\x89", call(name_of("collections", "OrderedDict")))


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def copies(function: bytes, *args: bytes) -> bytes:
    """A list of the results of a call with the same arguments."""
    return b"](" + function + b"r\1\0\0\0" + tuple_of(*args) + b"r\2\0\0\0" + TIMES * b"j\1\0\0\0j\2\0\0\0R" + b"e"


BEGIN = name_of("numpy._core.multiarray", "_reconstruct")


def array_copies() -> bytes:
    begin = BEGIN + tuple_of(name_of("numpy", "ndarray"), b"K\0\x85", b"N")
    state = tuple_of(number(1), tuple_of(number(100_000)), DTYPE, b"\x89", CONTENT)
    return b"](" + state + b"r\1\0\0\0" + TIMES * (begin + b"Rj\1\0\0\0b") + b"e"


def attributes() -> bytes:
    """An ordered dict whose attributes are those of one large dict, again and again."""
    names = b"".join(text(f"a{index}") + b"N" for index in range(50_000))
    return call(name_of("collections", "OrderedDict")) + b"}(" + names + b"ur\1\0\0\0b" + 200 * b"j\1\0\0\0b"


def arguments() -> bytes:
    """Calls with the same very many arguments."""
    many = b"(" + name_of("numpy", "ndarray") + 300_000 * b"N" + b"tr\1\0\0\0R"
    return b"](" + BEGIN + b"r\2\0\0\0" + many + 100 * b"j\2\0\0\0j\1\0\0\0R" + b"e"


def expanded(kind: str, key: str, numel: int, *size: int) -> bytes:
    zeros = tuple_of(*(number(0) for _ in size))
    args = (storage_ref(kind, key, numel), number(0), tuple_of(*map(number, size)), zeros, *HOOKS)
    return call(name_of("torch._utils", "_rebuild_tensor_v2"), *args)


def many_quantized() -> bytes:
    scales = expanded("FloatStorage", "0", 4, 16_000)
    quantizer = tuple_of(name_of("torch", "per_channel_affine"), scales, scales, number(0))
    where = (storage_ref("QInt8Storage", "2", 16), number(0), tuple_of(number(16)), tuple_of(number(1)))
    return copies(name_of("torch._utils", "_rebuild_qtensor"), *where, quantizer, *HOOKS)


def many_views() -> bytes:
    where = (storage_ref("FloatStorage", "0", 4), number(0), tuple_of(number(4_000_000)), tuple_of(number(0)), *HOOKS)
    return copies(name_of("torch._utils", "_rebuild_tensor_v2"), *where)


def many_sparse() -> bytes:
    layout = call(name_of("torch.serialization", "_get_layout"), text("torch.sparse_coo"))
    indices = expanded("LongStorage", "1", 2, 1, 100_000)
    parts = tuple_of(indices, expanded("FloatStorage", "0", 4, 100_000), tuple_of(number(2)), b"\x88")
    return copies(name_of("torch._utils", "_rebuild_sparse_tensor"), layout, parts)


def keys(*values: bytes) -> bytes:
    return b"}(" + b"".join(value + b"N" for value in values) + b"u"


COMPLEX = [call(name_of("builtins", "complex"), real(-1000003.0 * k), real(float(k))) for k in range(1, 200)]
# Minus one and minus two have the same hash.
PAIRS = [tuple_of(*(b"J" + struct.pack("<i", one) for one in ones)) for ones in itertools.product((-1, -2), repeat=8)]
POWERS = [real(2.0**power) for power in range(-900, 900, 61)]
SCALARS = [
    call(name_of("numpy._core.multiarray", "scalar"), call(name_of("numpy", "dtype"), text("c16")), content)
    for content in (
        call(ENCODE, text(struct.pack("<dd", -1000003.0 * k, float(k)).decode("latin1")), LATIN) for k in range(1, 200)
    )
]
COPIES = "copies of the same values too often"
SLOW = "made to be slow"
DEEP = "nested"
EXPENSIVE = {
    "bytes": (copies(ENCODE, text("x" * 100_000), LATIN), COPIES),
    "a bytearray": (copies(name_of("builtins", "bytearray"), text("x" * 100_000), LATIN), COPIES),
    "an array": (array_copies(), COPIES),
    "attributes": (attributes(), COPIES),
    "arguments": (arguments(), COPIES),
    "a set": (copies(name_of("builtins", "set"), b"](" + b"".join(map(number, range(5_000))) + b"e"), COPIES),
    "a counter": (copies(name_of("collections", "Counter"), keys(*map(number, range(5_000)))), COPIES),
    "an ordered dict": (
        copies(name_of("collections", "OrderedDict"), b"](" + b"".join(5_000 * [b"K\1K\1\x86"]) + b"e"),
        COPIES,
    ),
    "an expanded tensor": (many_views(), COPIES),
    "scales": (many_quantized(), COPIES),
    "indices": (many_sparse(), COPIES),
    "complex numbers of one hash": (keys(*COMPLEX), SLOW),
    "such numbers of numpy": (keys(*SCALARS), SLOW),
    "tuples of one hash": (keys(*PAIRS), SLOW),
    "tuples of floats of one hash": (keys(*(tuple_of(*two) for two in itertools.product(POWERS, repeat=2))), SLOW),
    "a set of one hash": (name_of("builtins", "set") + b"(](" + b"".join(COMPLEX) + b"etR", SLOW),
    "an ordered dict of one hash": (
        name_of("collections", "OrderedDict") + b"(](" + b"".join(one + b"N\x86" for one in COMPLEX) + b"etR",
        SLOW,
    ),
    "begun lists": (b"](" * 100_000, DEEP),
    "marks": (b"(" * 100_000, DEEP),
    "tuples that double": (b"]" + 300 * b"q\1h\1\x86", DEEP),
    "nested lists": (b"]" * 300 + b"a" * 299, DEEP),
    "nested dicts": (b"}" + b"K\1}" * 300 + b"s" * 300, DEEP),
    "nested tuples": (b")" + b"\x85" * 300, DEEP),
}


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_a_few_bytes_cannot_be_meant_to_hold_is_refused(name: str, old: bool, tmp_path: Path) -> None:
    value, message = EXPENSIVE[name]
    pickled = b"\x80\x02}" + text("w") + (value.replace(b"tQ", b"NtQ") if old else value) + b"s."
    path = tmp_path / "state.pth"
    path.write_bytes(mutations.made_up_old_file(pickled) if old else mutations.made_up_archive(pickled))
    with pytest.raises(errors.UnsafeCheckpointError, match=message):
        read_state(path)


LAYER = torch.ones(1_000_000)
ORDINARY: dict[str, Any] = {
    "shared": [[np.zeros(10)] * 1000, [b"x" * 1000] * 1000, ["x" * 5000] * 1000],
    "integers": {index: index for index in range(-5000, 5000)},
    "large integers": {2**62 + index: index for index in range(1000)},
    "numbers of numpy": {np.int64(index): index for index in range(5000)},
    "tuples": {(row, np.int32(column)): 1 for row in range(-50, 50) for column in range(-50, 50)},
    "complex": {complex(row, column): 1 for row in range(50) for column in range(50)},
    "floats": {float(index) / 7: 1 for index in range(5000)},
    "bytes": {b"": 1, b"a": 2},
    "nested": [[[[{"a": ({"b": [[1]]},)}]]]],
    "without elements": [b"", bytearray(), np.zeros(0), np.zeros((0, 3)), torch.zeros(0)],
    "sets": [set(range(1000)) for _ in range(2000)],
    "a large set": set(range(10**6, 2 * 10**6)),
    "counters": [collections.Counter(range(1000)) for _ in range(1000)],
    "a layer of many names": [LAYER.view(1000, 1000) for _ in range(100)],
    "a row for many": LAYER.expand(100, -1),
    "expanded": [torch.ones(1).expand(1_000_000) for _ in range(10)],
    "sparse": [torch.eye(1000).to_sparse() for _ in range(10)],
    "quantized": [
        torch.quantize_per_channel(torch.ones(500, 4), torch.ones(500), torch.zeros(500), 0, torch.qint8)
        for _ in range(10)
    ],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_values_of_any_number_are_read(name: str, tmp_path: Path) -> None:
    torch.save({"value": ORDINARY[name]}, tmp_path / "state.pth")
    assert repr(read_state(tmp_path / "state.pth")["value"]) == repr(ORDINARY[name])
