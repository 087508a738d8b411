"""Files are looked through before torch reads them; no plain value is refused that any release wrote."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import pickle
import random
import tempfile
import types
import uuid
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState, load_checkpoint
from det_lightning.checkpoint.format.layout import digest_file
from det_lightning.checkpoint.format.lightning_file import from_entry, to_entry
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.safe_load import read_pickle, read_state
from det_lightning.checkpoint.safe_load.reading import read_known_state
from tests.checkpoint.made_checkpoints import assert_equal, make_resume
from tests.soak.mutations import NO_HOOKS, call, made_up_state, name_of, number, rebuild, storage_ref, text, tuple_of

BASE = torch.arange(100.0).reshape(10, 10)


def stepped(name: str) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    optimizer.step(lambda: 1.0)
    return optimizer.state_dict()


def scheduled(make: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    state: dict[str, Any] = make(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), **kwargs).state_dict()
    return state


NUMBERS = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.bool]
MODEL = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.LSTM(4, 5))
SCHEDULERS = torch.optim.lr_scheduler
VALUES: dict[str, Any] = {
    "types": [torch.ones(2, dtype=kind) for kind in [*NUMBERS, torch.complex64, torch.complex128]],
    "views": [BASE, BASE[2:5], BASE.t(), BASE.expand(3, 10, 10), BASE[::2], torch.empty(0, 3), torch.tensor(3.0)],
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": [BASE.to_sparse(), BASE.to_sparse_csr()],
    "quantized": [torch.quantize_per_tensor(BASE, 0.1, 2, torch.qint8), torch.ones(2, device="meta")],
    "parameters": [torch.nn.Parameter(BASE), torch.ones(2, requires_grad=True)],
    "model": MODEL.state_dict(),
    "optimizers": [stepped(name) for name in ["Adam", "SGD", "RMSprop", "Adagrad", "LBFGS", "ASGD", "Rprop"]],
    "schedulers": [
        scheduled(SCHEDULERS.StepLR, step_size=2),
        scheduled(SCHEDULERS.OneCycleLR, max_lr=0.1, total_steps=10),
        scheduled(SCHEDULERS.ReduceLROnPlateau),
        scheduled(SCHEDULERS.CyclicLR, base_lr=0.1, max_lr=0.2, cycle_momentum=False),
        scheduled(SCHEDULERS.LambdaLR, lr_lambda=lambda epoch: 1.0),
        scheduled(SCHEDULERS.MultiStepLR, milestones=[1, 2]),
    ],
    "random states": [np.random.get_state(), random.getstate(), torch.get_rng_state()],
    "generators": [kind(3).state for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)],
    "numpy": [np.float32(1), np.bool_(True), np.array(["ab", "c"]), np.array(5), np.zeros((2, 3), order="F")],
    "containers": [collections.OrderedDict(a=1), collections.Counter("abc"), {1, "a"}, {(1, 2): 3}, torch.Size([1])],
    "plain": [b"abc\xff", bytearray(b"xy"), 2**100, -5, float("inf"), 1 + 2j, None, "x" * 10000],
    "shared": [[np.zeros(10)] * 1000, [b"x" * 1000] * 1000, [BASE.expand(100, 10, 10)] * 10],
    "many": [{(row, np.int32(column)): 1 for row in range(20) for column in range(20)}, set(range(10**5))],
    "empty": [b"", bytearray(), np.zeros((0, 3)), torch.zeros(0)],
    "torch": [torch.float32, torch.device("cpu"), torch.strided],
}


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("name", VALUES)
def test_all_values_of_torch_are_read(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / "state.pth"
    torch.save({"value": VALUES[name]}, path, _use_new_zipfile_serialization=zipped)
    assert_same(read_state(path)["value"], VALUES[name])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (collections.deque([1], 5), "a collections.deque with items, which torch's restricted reader does not fill"),
        (zoneinfo.ZoneInfo("UTC"), "a call of builtins.getattr with zoneinfo.ZoneInfo"),
        (2**3000, "an integer of more than 255 bytes, which"),
    ],
)
def test_unreadable_value_is_named(value: Any, named: str, tmp_path: Path) -> None:
    """Such files come from other programs: a run of ours writes what can be read, or warns."""
    torch.save({"value": value}, tmp_path / "state.pth")
    with pytest.raises(errors.UnsafeCheckpointError, match=f"{named}.*pass trusted=True"):
        read_state(tmp_path / "state.pth")
    assert read_state(tmp_path / "state.pth", trusted=True) == {"value": value}


class Config:
    """A class that the user declares harmless."""


class Slotted:
    """Another one, without a dict."""

    __slots__ = ("__private", "array")

    def __init__(self, value: Any) -> None:
        self.__private = self.array = value

    def list_values(self) -> list[Any]:
        return [self.__private, self.array]


Pair = collections.namedtuple("Pair", ["first", "second"])


class Series(tuple[Any, ...]):
    """A tuple with attributes, whose class takes several arguments."""

    def __new__(cls, *items: Any) -> Series:
        return super().__new__(cls, items)

    def __getnewargs__(self) -> Any:
        return tuple(self)


def test_no_stand_in_remains(tmp_path: Path) -> None:
    array, kind = np.arange(3.0), np.dtype("f4")
    parameter: Any = torch.nn.Parameter(torch.ones(1))
    parameter.scale = {"a": [array]}
    config: Any = Config()
    config.array, config.kinds, config.itself = array, {kind}, config
    series: Any = Series(array, kind)
    series.extra = array
    state = {
        "parameter": parameter,
        "config": config,
        "slotted": Slotted(array),
        "pair": Pair(array, (kind, 1)),
        "series": series,
        "slice": slice(array, kind),
        "kinds": frozenset({kind}),
    }
    torch.save(state, tmp_path / "state.pth")
    with pytest.raises(errors.UnsafeCheckpointError, match="could run code"):
        read_state(tmp_path / "state.pth")
    declared: list[Any] = [Config, Slotted, Pair, Series, np.ndarray, np.arange(1).__reduce__()[0]]
    with torch.serialization.safe_globals(declared):
        before = set(torch.serialization.get_safe_globals())
        read = read_state(tmp_path / "state.pth")
        assert set(torch.serialization.get_safe_globals()) == before
    assert read["pair"]._fields == Pair._fields
    assert read["config"].itself is read["config"]
    arrays = [read["parameter"].scale["a"][0], read["config"].array, *read["slotted"].list_values()]
    arrays += [read["pair"].first, read["series"][0], read["series"].extra, read["slice"].start]
    assert [one.tolist() for one in arrays] == [array.tolist()] * len(arrays)
    assert [read["pair"].second[0], read["series"][1], read["slice"].stop] == [kind] * 3
    assert [read["config"].kinds, read["kinds"]] == [{kind}] * 2


class Meter:
    """A class of a trial."""


def test_refused_value_is_named(tmp_path: Path) -> None:
    torch.save({"value": Meter()}, tmp_path / "state.pth")
    with pytest.raises(errors.UnsafeCheckpointError) as raised:
        read_state(tmp_path / "state.pth")
    assert str(raised.value) == (
        f"{tmp_path / 'state.pth'} refers to {__name__}.Meter, so reading the file could run code. If it is harmless, "
        "declare it with torch.serialization.add_safe_globals(); if you know where the file comes from, pass "
        "trusted=True."
    )


def test_recorded_file_is_read_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose SHA-256 was recorded is read with its objects; any other file is not even copied."""
    path = tmp_path / "state.pth"
    torch.save({"meter": Meter()}, path)
    assert isinstance(read_known_state(path, recorded=[digest_file(path)])["meter"], Meter)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(errors.UnsafeCheckpointError, match=r"Meter.* could run code"):
        read_known_state(path, recorded=["0" * 64])
    with pytest.raises(OSError, match="missing"):
        read_known_state(path, recorded=[digest_file(path)])


# Values of the standard library come back as themselves, from state files and from .ckpt files

STANDARD: dict[str, Any] = {
    "deque": collections.deque([1.0, 2.0], maxlen=5),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "defaultdict without a factory": collections.defaultdict(None, {"a": [1]}),
    "datetime": datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc),
    "zone": datetime.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
    "date": datetime.date(2020, 1, 2),
    "time": datetime.time(1, 2, 3, 4),
    "timedelta": datetime.timedelta(days=3, microseconds=1),
    "timezone": datetime.timezone(datetime.timedelta(hours=1), "CET"),
    "path": pathlib.Path("a/b"),
    "pure path": pathlib.PureWindowsPath("c:/a"),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=7),
    "range": range(1, 9, 2),
    "slice": slice(1, None, 2),
    "frozenset": frozenset({1, "a"}),
    "namespace": argparse.Namespace(a=1, b=[2]),
    "simple namespace": types.SimpleNamespace(c=3),
    "nested": [collections.deque([collections.defaultdict(list, x=[pathlib.Path("q"), datetime.timedelta(1)])])],
}


@pytest.mark.parametrize("name", STANDARD)
def test_value_comes_back_as_itself(name: str, tmp_path: Path) -> None:
    save_state({"value": STANDARD[name]}, tmp_path / "state.pth")
    assert_same(read_state(tmp_path / "state.pth")["value"], STANDARD[name])
    # As Determined reads it.
    assert_same(torch.load(tmp_path / "state.pth", weights_only=False)["value"], STANDARD[name])
    # Of a .ckpt file the entry is plain.
    state = {"callbacks": {"c": STANDARD[name]}}
    torch.save(to_entry(CheckpointContent(state, TrialState())), tmp_path / "entry")
    read = from_entry(torch.load(tmp_path / "entry", weights_only=True))
    assert_same(read.state["callbacks"]["c"], STANDARD[name])
    assert state["callbacks"]["c"] is STANDARD[name]


def test_all_files_may_hold_them(tmp_path: Path) -> None:
    value = {"c": collections.deque([np.arange(2), torch.ones(2), np.dtype("f4")], maxlen=3)}
    resume = make_resume()
    resume.rng_states = [value]
    content = CheckpointContent({"callbacks": value}, TrialState(), resume=resume, lightning={"callbacks": value})
    (tmp_path / "code").mkdir()
    name = CheckpointStorage(tmp_path / "storage").write(content, code=tmp_path / "code")
    read = load_checkpoint(tmp_path / "storage" / name)
    assert read.resume is not None
    assert read.lightning is not None
    for found in (read.state["callbacks"], read.lightning["callbacks"], read.resume.rng_states[0]):
        assert repr(found) == repr(value)
        assert type(found["c"][0]) is np.ndarray


# Values as numpy 1.13 to 2.4 and torch 1.0 to 2.13 pickled them


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
