"""Values as numpy 1.13 to 2.4 and torch 1.0 to 2.13 pickled them are read, without trust."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from det_lightning import errors
from det_lightning.checkpoint.safe_load import read_pickle, read_state
from tests.checkpoint.made_checkpoints import assert_equal
from tests.soak.mutations import NO_HOOKS, call, made_up_state, name_of, number, rebuild, storage_ref, text, tuple_of

FLAGS = {"integers": (number(0), number(1)), "booleans": (b"\x89", b"\x88")}


def pickled_bytes(content: bytes) -> bytes:
    return call(name_of("_codecs", "encode"), text(content.decode("latin1")), text("latin1"))


def pickled_dtype(dtype: np.dtype[Any], flags: tuple[bytes, bytes]) -> bytes:
    order = {"=": "<", "|": "|", ">": ">", "<": "<"}[dtype.byteorder]
    sizes = (number(dtype.itemsize), number(1)) if dtype.kind == "S" else (b"J\xff\xff\xff\xff", b"J\xff\xff\xff\xff")
    made = call(name_of("numpy", "dtype"), text(dtype.str[1:]), *flags)
    return made + tuple_of(number(3), text(order), b"N", b"N", b"N", *sizes, number(0)) + b"b"


def pickled_array(array: np.ndarray[Any, Any], flags: tuple[bytes, bytes], core: str) -> bytes:
    kind = (name_of("numpy", "ndarray"), tuple_of(number(0)), pickled_bytes(b"b"))
    shape, dtype = tuple_of(*map(number, array.shape)), pickled_dtype(array.dtype, flags)
    state = tuple_of(number(1), shape, dtype, flags[0], pickled_bytes(array.tobytes()))
    return call(name_of(f"numpy.{core}.multiarray", "_reconstruct"), *kind) + state + b"b"


def read_made_up(value: bytes, zipped: bool, folder: Path) -> Any:
    (folder / "state.pth").write_bytes(made_up_state(value, old=not zipped))
    return read_state(folder / "state.pth")["w"]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize(("core", "flags"), [("core", "integers"), ("core", "booleans"), ("_core", "booleans")])
@pytest.mark.parametrize("dtype", ["<u4", ">f4", "|b1", "<c16", "|S3", ">i2"])
def test_array_and_a_scalar_are_read(dtype: str, flags: str, core: str, zipped: bool, tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = read_made_up(pickled_array(array, FLAGS[flags], core), zipped, tmp_path)
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())
    kind = pickled_dtype(array.dtype, FLAGS[flags])
    content = pickled_bytes(array[1:, 1].tobytes())
    scalar = call(name_of(f"numpy.{core}.multiarray", "scalar"), kind, content)
    assert read_made_up(scalar, zipped, tmp_path) == array[1, 1]
    assert read_made_up(kind, zipped, tmp_path) == array.dtype


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_tensors_of_torch_1_are_read(zipped: bool, tmp_path: Path) -> None:
    """Its first releases rebuilt tensors without hooks, and referred to storages with a view or without."""
    where = (storage_ref(), number(0), tuple_of(number(2), number(2)), tuple_of(number(2), number(1)))
    for tensor in (rebuild("tensor", *where), rebuild("tensor_v2", *where, b"\x89", NO_HOOKS)):
        assert read_made_up(tensor, zipped, tmp_path).shape == (2, 2)
        parameter = rebuild("parameter", tensor, b"\x88", NO_HOOKS)
        assert read_made_up(parameter, zipped, tmp_path).requires_grad


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_names_of_python_2_are_understood(zipped: bool, tmp_path: Path) -> None:
    """Protocol 2 writes them, today as well."""
    values = call(name_of("__builtin__", "set"), b"](" + number(1) + number(2) + b"e")
    assert read_made_up(values, zipped, tmp_path) == {1, 2}
    numbers = call(name_of("__builtin__", "xrange"), number(0), number(3))
    assert read_made_up(numbers, zipped, tmp_path) == range(3)


RANDOM: dict[str, Any] = {
    "np_rng_state": np.random.RandomState(3).get_state(),
    "random_rng_state": random.Random(3).getstate(),
    "tf_rng_global_seed": None,
}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_of_any_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "rng_state.pkl"
    path.write_bytes(pickle.dumps(RANDOM, protocol))
    assert_equal(read_pickle(path, with_arrays=True), RANDOM)
    with pytest.raises(errors.CheckpointError):
        read_pickle(path)
    counts = {"trial_id": 526, "last_ckpt": 1, "latest_batch": 1, "step_id": 1, "last_val": 0}
    path.write_bytes(pickle.dumps(counts, protocol))
    assert read_pickle(path) == counts
