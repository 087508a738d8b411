"""Reading damaged and malicious checkpoints runs nothing, ends no process, and raises our errors only."""

from __future__ import annotations

import itertools
import json
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint import read_checkpoint
from det_lightning.checkpoint.format.layout import describe_file, find_damage, require_unchanged
from det_lightning.checkpoint.safe_load import read_pickle, read_state, read_trial_state
from det_lightning.checkpoint.safe_load.safe_globals import RANDOM_STATES
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.soak import mutations
from tests.soak.mutations import call, made_up_state, name_of, number, rebuild, storage_ref, tensor, text, tuple_of
from tests.warm_python import WarmPython


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_undamaged_checkpoint_is_read(tmp_path: Path) -> None:
    for files in mutations.make_corpus(tmp_path / "corpus").values():
        mutations.write_files(tmp_path / "storage" / "checkpoint", files)
        assert read_checkpoint(tmp_path / "storage" / "checkpoint").state


def nested(levels: int = 60) -> bytes:
    """A tuple that holds another one twice, which holds another one twice, ..."""
    return b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(levels))


def deep(levels: int = 1_000_000) -> bytes:
    """Tuples within tuples, which Python hashes by recursion."""
    return b")" + b"\x85" * levels


LAYOUT = name_of("torch.serialization", "_get_layout")
DTYPE = name_of("numpy", "dtype")
NAMESPACE = name_of("argparse", "Namespace")
AS_DTYPE = b"N}(" + text("dtype") + text("O") + text("__class__") + DTYPE + b"u\x86"
STORAGE = storage_ref()


def rebuild_typed(*args: bytes) -> bytes:
    return call(name_of("torch._tensor", "_rebuild_from_type_v2"), *args)


def array(shape: bytes, dtype: str, content: bytes) -> bytes:
    begin = call(name_of("numpy._core.multiarray", "_reconstruct"), name_of("numpy", "ndarray"), b")", b"N")
    return begin + tuple_of(number(1), shape, call(DTYPE, text(dtype)), b"\x89", content) + b"b"


def latin(value: str) -> bytes:
    return call(name_of("_codecs", "encode"), text(value), text("latin1"))


INDICES = tensor(storage_ref("LongStorage", "1", 2), 0, (1, 2), (2, 1))
SPARSE = (INDICES, tensor(storage_ref("ByteStorage", "2", 16), 0, (2,)), tuple_of(number(2)), b"\x88")
SLICES = name_of("builtins", "slice") + b"q\x01" + b"h\x01" * 4999 + b"N" + b"\x85R" * 5000
MADE_UP = {
    "a tensor of a class without end": call(name_of("torch", "FloatTensor"), number(10**10)),
    "a tensor set to other memory": name_of("torch", "Tensor") + tuple_of(STORAGE, number(0)) + b"b",
    "a larger storage than there is": tensor(storage_ref(numel=10**9), shape=(10**9,)),
    "a negative storage": tensor(storage_ref(numel=-4)),
    "beyond the storage": tensor(STORAGE, shape=(5,)),
    "before the storage": tensor(STORAGE, offset=-1),
    "a wide stride": tensor(STORAGE, shape=(2,), strides=(2**61,)),
    "a nested tensor": rebuild("nested_tensor", *[tensor(STORAGE)] * 4),
    "sparse indices": rebuild("sparse_tensor", call(LAYOUT, text("torch.sparse_coo")), tuple_of(*SPARSE)),
    "a made-up call": rebuild_typed(
        name_of("builtins", "bytearray"), name_of("torch", "Tensor"), tuple_of(number(10**10)), b"N"
    ),
    "an object that becomes a data type": call(NAMESPACE) + AS_DTYPE + b"b",
    "an object that a call makes a data type": rebuild_typed(NAMESPACE, NAMESPACE, b")", AS_DTYPE),
    "a made-up chain": rebuild_typed(name_of("collections", "deque"), name_of("collections", "deque"), b"](]e", b"N"),
    "a method that is none": call(name_of("collections", "OrderedDict")) + b"}(" + text("items") + b"Nub",
    "a key whose hash ends the process": b"}" + deep() + b"Ns",
    "a set of it": call(name_of("builtins", "set"), b"](" + deep() + b"e"),
    "slices within slices": b"}" + SLICES + b"Ns",
    "lists within lists": b"]" * 100_000 + b"a" * 99_999,
    "an array of 65 dimensions": array(tuple_of(*[number(1)] * 65), "u1", latin("x")),
    "a mesh of devices": call(name_of("torch.distributed.device_mesh", "DeviceMesh"), text("cpu"), b"](K\0e"),
    "a function of the system": call(name_of("posix", "system"), text("true")),
    "one named by two texts": b"\x8c\x05posix\x8c\x06system\x93" + tuple_of(text("true")) + b"R",
    "one in a line": b"(" + text("true") + b"iposix\nsystem\n",
    "one by a number": b"\x82\x01",
    "a key without a hash": b"}]Ns",
    "a date that is none": call(name_of("datetime", "date"), latin("\xff\xff\x0c\xff")),
    "a key that is never hashed": b"}" + nested() + b"Ns",
    "a set of such": call(name_of("builtins", "set"), b"](" + nested() + b"e"),
    "an endless message": call(DTYPE, nested()),
    "another endless message": call(DTYPE, text("f4")) + nested() + b"b",
    "a data type of objects": call(DTYPE, text("O")),
    "a data type of arrays": call(DTYPE, text("(2,3)f4")),
    "an array of objects": array(tuple_of(number(1)), "O", latin("A" * 8)),
    "an array of a list": array(tuple_of(number(2)), "i8", b"](NNe"),
}


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
def test_made_up_state_is_refused(name: str, old: bool, tmp_path: Path) -> None:
    path = tmp_path / "state_dict.pth"
    path.write_bytes(made_up_state(MADE_UP[name], old))
    with pytest.raises(errors.CheckpointError, match=r"state_dict\.pth") as raised:
        read_state(path)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
def test_storage_named_in_bytes_is_refused(old: bool, tmp_path: Path) -> None:
    """The bytes are one letter in one encoding, and two in another."""
    content = made_up_state(tensor(STORAGE).replace(text("0"), b"U\x02\xc3\xa9"), old)
    if not old:
        storages = [("archive/data/\xc3\xa9", b"x" * 16), ("archive/data/\xe9", b"x")]
        content = mutations.zip_of([*mutations.entries_of(content)[:1], *storages])
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(errors.IncompleteCheckpointError, match="a reference to a storage has unexpected parts"):
        read_state(tmp_path / "state")


@pytest.mark.parametrize("by_torch", [False, True])
def test_wrong_sparse_tensor_does_not_spoil_the_next_read(by_torch: bool, tmp_path: Path) -> None:
    pickled = b"\x80\x02}(" + text("w") + MADE_UP["sparse indices"] + b"}Nu."  # a dict as a key
    (tmp_path / "bad").write_bytes(mutations.made_up_archive(pickled))
    torch.save({"w": torch.ones(2)}, tmp_path / "good")
    with pytest.raises((errors.CheckpointError, TypeError), match="unhashable"):
        torch.load(tmp_path / "bad", weights_only=True) if by_torch else read_state(tmp_path / "bad")
    assert len(read_state(tmp_path / "good")["w"]) == 2


def test_flags_of_a_data_type_have_no_effect(tmp_path: Path) -> None:
    """Of these flags one says that the memory holds references to objects."""
    dtype = call(DTYPE, text("f4")) + b"(K\x03" + text("<") + b"NNNK\0K\0K\x3ftb"
    (tmp_path / "state").write_bytes(made_up_state(dtype))
    read = read_state(tmp_path / "state")["w"]
    assert (read, read.hasobject, read.flags) == (np.dtype("f4"), False, 0)


NUMPYS: list[Any] = [np.ndarray, np.dtype, np.arange(1).__reduce__()[0]]


def test_forged_array_is_refused_despite_declaration(tmp_path: Path) -> None:
    """numpy's own function would follow a pointer."""
    (tmp_path / "state").write_bytes(made_up_state(MADE_UP["an array of objects"]))
    said = "a numpy data type 'O', which is not one of plain values"
    numpys = torch.serialization.safe_globals([*NUMPYS, type(np.dtype("O"))])
    with numpys, pytest.raises(errors.UnsafeCheckpointError, match=said):
        read_state(tmp_path / "state")


@pytest.mark.parametrize("name", ["_reconstruct", "scalar"])
def test_file_changes_no_function(name: str, tmp_path: Path) -> None:
    function = name_of("numpy.core.multiarray", name)
    state = b"N}" + text("__defaults__") + tuple_of(number(1)) + b"s\x86b"
    (tmp_path / "state").write_bytes(b"\x80\x02}" + text("w") + function + state + b"s.")
    with pytest.raises(errors.IncompleteCheckpointError, match="invalid partial state"):
        read_pickle(tmp_path / "state", with_arrays=True)
    assert RANDOM_STATES[f"numpy.core.multiarray.{name}"].__defaults__ is None


def test_refused_name_is_not_looked_up(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """torch imports modules when they are looked up, and warns of this name."""
    (tmp_path / "state").write_bytes(made_up_state(name_of("torch", "has_mps")))
    with pytest.raises(errors.UnsafeCheckpointError, match=r"torch\.has_mps"):
        read_state(tmp_path / "state")
    assert not recwarn.list


TRIAL_STATES = {
    "a huge count": pickle.dumps({"batches_trained": 10**5000}),
    "a huge key": pickle.dumps({10**5000: 1}),
    "lists": pickle.dumps({"batches_trained": [[["x" * 10] * 10] * 10] * 10}),
    "a far memo": b"\x80\x02}X\x01\0\0\0aN" + b"r\xff\xff\xff\x7f" + b"s.",
    "nested keys": b"\x80\x02}" + nested() + b"Ns.",
    "a nested set": b"\x80\x04\x8f(" + nested() + b"\x90.",
    "a large file": pickle.dumps({"batches_trained": 1, "more": "x" * 100_000}),
}


@pytest.mark.parametrize("name", TRIAL_STATES)
def test_made_up_trial_state_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "trial_state.pkl").write_bytes(TRIAL_STATES[name])
    with pytest.raises(errors.IncompleteCheckpointError, match=r"trial_state\.pkl") as raised:
        read_trial_state(tmp_path)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", ["a/" * 3000 + "a", "a\0b", "\ud800", "x" * 300])
def test_manifest_with_an_impossible_name_is_damage(name: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"files": {name: {"bytes": 1, "crc32c": "0"}}}))
    (damage,) = find_damage(tmp_path)
    assert damage.endswith(("is missing", "cannot be read: File name too long"))


@pytest.mark.parametrize("name", ["./code/a.py", "code//a.py", "code/./a.py", "code/a.py/"])
def test_manifest_lists_files_once(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    file = checkpoint / "code/a.py"
    file.write_text("content")
    (checkpoint / "metadata.json").write_text(json.dumps({"files": {name: describe_file(file)}}))
    (damage,) = find_damage(checkpoint)
    assert damage == f'metadata.json lists "{name}", which is not the plain path of a file'
    with pytest.raises(errors.IncompleteCheckpointError, match="not the plain path"):
        require_unchanged(checkpoint, [name])


# Files that would end the process if torch read them

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
    """Read each state file in a process of its own; return what that says."""
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
