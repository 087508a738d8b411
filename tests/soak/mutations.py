"""Damaged and malicious checkpoints, made from good ones; the same number always makes the same."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import re
import shutil
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from det_lightning.checkpoint import CheckpointContent, CheckpointStorage, TrialState
from tests.checkpoint import layouts
from tests.checkpoint.made_checkpoints import make_resume

DTYPES = (torch.float64, torch.float16, torch.int8, torch.complex64, torch.uint16)

#: Path in the checkpoint -> content.
Files = dict[str, bytes]

SENTINEL = "the-code-ran"
PICKLES = ("trial_state.pkl", "workload_sequencer.pkl")

EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 63, 127, 128, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 33, 10**10, 10**12]
EDGES += [1 << 53, (1 << 61) - 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**100, -1, -2, -(1 << 31), -(1 << 63)]
TEXTS = ["w", "0", "1", "cpu", "cuda", "meta", "storage", "latin1", "punycode", "zlib", "undefined", "\0", "../../x"]
TEXTS += ["__class__", "__dict__", "__setstate__", "data", "grad", "items", "_metadata", "trial_id", "batches_trained"]
TEXTS += ["f4", "O", "|O8", "V0", "(2,3)f4", "f4,O", "m8[ns]", "U1000000000", "<", ">"]
TEXTS += ["torch.sparse_coo", "torch.strided"]
TEXTS += [f"touch {SENTINEL}", f"open({SENTINEL!r}, 'w').close()", "models_state_dict", "_annealing_cos"]
DANGEROUS = """os system|posix system|builtins exec|builtins eval|builtins getattr|builtins __import__|builtins open
subprocess Popen|shutil rmtree|socket socket|importlib import_module|functools partial|types CodeType|ctypes CDLL
torch load|torch hub.load|torch.jit load|torch.utils.cpp_extension load|torch._utils _import_dotted_name|torch from_file
torch.storage _load_from_bytes|numpy load|numpy fromfile|numpy memmap|copyreg _reconstructor|codecs open|sys exit
numpy.core.multiarray fromfile|numpy.testing._private.utils runstring|copy_reg _reconstructor|__builtin__ eval
os _exit|posix _exit|posix abort|faulthandler _sigsegv|signal raise_signal|asyncio.subprocess Process|pty spawn"""
ALLOWED = """collections OrderedDict|collections Counter|torch.nn.parameter Parameter|torch.serialization _get_layout
torch Size|torch Tensor|torch device|_codecs encode|builtins bytearray|builtins set|builtins complex|torch float32
torch int64|torch bfloat16|torch uint3|torch quint8|torch FloatTensor|torch.sparse FloatTensor|torch.cuda FloatTensor
torch.storage UntypedStorage|torch.storage TypedStorage|torch FloatStorage|torch LongStorage|torch QInt8Storage
torch BoolStorage|torch per_tensor_affine|torch per_channel_affine|torch._utils _rebuild_parameter
torch._utils _rebuild_parameter_with_state|torch._utils _rebuild_qtensor|torch._utils _rebuild_tensor
torch._utils _rebuild_tensor_v2|torch._utils _rebuild_tensor_v3|torch._utils _rebuild_sparse_tensor
torch._utils _rebuild_meta_tensor_no_storage|torch._utils _rebuild_nested_tensor|torch._utils _rebuild_wrapper_subclass
torch._utils _rebuild_device_tensor_from_numpy|torch._utils _rebuild_device_tensor_from_cpu_tensor
torch._tensor _rebuild_from_type_v2|numpy ndarray|numpy dtype|numpy._core.multiarray _reconstruct
numpy.core.multiarray scalar|torch.optim.lr_scheduler OneCycleLR|torch.distributed.tensor DTensor
torch.nested._internal.nested_tensor _rebuild_njt|torch.nested._internal.nested_tensor NestedTensor
torch.distributed.device_mesh DeviceMesh|torch.distributed.tensor._dtensor_spec DTensorSpec
collections deque|collections defaultdict|datetime datetime|datetime date|datetime time|datetime timedelta
datetime timezone|zoneinfo ZoneInfo|decimal Decimal|fractions Fraction|uuid UUID|argparse Namespace
types SimpleNamespace|pathlib PosixPath|pathlib WindowsPath|builtins frozenset|builtins slice|builtins range
builtins list|builtins dict|builtins str|builtins bytes|numpy.core.numeric _frombuffer"""


def _names(listed: str) -> list[tuple[str, str]]:
    return [(module, name) for module, _, name in (one.partition(" ") for one in listed.replace("\n", "|").split("|"))]


# The corpus


def make_state(old: bool = False) -> dict[str, Any]:
    """Return a state with every kind of value that a checkpoint can hold; the old format knows fewer data types."""
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.mine = 3  # type: ignore[attr-defined]
    model: OrderedDict[str, Any] = OrderedDict(weight=torch.ones(3, 2), bias=torch.zeros(3))
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    groups = {"lr": 0.1, "params": [0]}
    return {
        "models_state_dict": [model],
        "optimizers_state_dict": [{"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [groups]}],
        "lr_schedulers_state_dict": [{"last_epoch": 3, "_last_lr": [0.1], "flag": True}],
        "callbacks": {
            "tensors": [base, base.bfloat16(), base[2:5], base[::2], base.reshape(3, 4).t(), torch.tensor(True)],
            "empty": torch.ones(0, 3),
            "kinds": [base.to(kind) for kind in DTYPES[: 4 if old else 5]],
            "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
            "quantized": torch.quantize_per_tensor(base, 0.1, 2, torch.qint8),
            "parameter": parameter,
            "meta": torch.ones(2, device="meta"),
            "arrays": [np.arange(4), np.ones((2, 3), order="F"), np.array(["a", "bc"])],
            "of numpy": [np.float32(1.5), np.dtype("f8")],
            "plain": [None, True, 1.5, 2**40, 2**70, "text", b"bytes", (1, (2, 3)), {1, 2}, 1j, bytearray(b"x")],
            "counts": Counter("abca"),
            "keys": {(0, "a"): 1, 2.5: 2, None: 3},
        },
        "rng_state": {
            "cpu_rng_state": torch.arange(16, dtype=torch.uint8),
            "np_rng_state": np.random.RandomState(0).get_state(),
            "random_rng_state": random.Random(0).getstate(),
        },
    }


def make_corpus(folder: Path) -> dict[str, Files]:
    """Write checkpoints of all kinds below ``folder``, and return them by name."""
    trial_state = TrialState(batches_trained=7, epochs_trained=2, last_val=5)
    load_data = {"trial_cls_spec": "m:T", "hparams": {"lr": 0.1}, "experiment_config": {"a": [1]}, "is_trainer": True}
    (folder / "code").mkdir(parents=True)
    content = CheckpointContent(make_state(), trial_state, load_data, make_resume())
    ours = _read(folder / "storage" / CheckpointStorage(folder / "storage").write(content, code=folder / "code"))
    metadata = json.loads(ours["metadata.json"])
    del metadata["files"], metadata["metadata_crc32c"]
    plain = {**ours, "metadata.json": json.dumps(metadata).encode()}
    old = io.BytesIO()
    torch.save(make_state(old=True), old, _use_new_zipfile_serialization=False)
    corpus = {"with a manifest": ours, "zip": plain, "old format": {**plain, "state_dict.pth": old.getvalue()}}
    del corpus["old format"]["resume.pth"]
    for protocol in range(6):
        pickled = pickle.dumps(dict(vars(trial_state)), protocol)
        corpus[f"pickle protocol {protocol}"] = {**plain, "trial_state.pkl": pickled}
    for layout in layouts.LAYOUTS:
        corpus[layout.name] = _read(layouts.write(folder / layout.name, layout))
    shutil.rmtree(folder)
    return corpus


def _read(directory: Path) -> Files:
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith("code/")}


# Bytes


def change_bytes(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    """Damage some bytes, in one of the ways that disks, transfers and people do."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 1, 2, 4, 8, 64, 1000]))
        way = rng.randrange(9)
        if way == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1 and at < len(data):
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif way == 2:
            data[at:at] = rng.randbytes(rng.choice([1, 2, 4, 16]))
        elif way == 3:
            del data[at:end]
        elif way == 4:
            data[at:at] = data[at:end]
        elif way == 5:
            del data[at:]
        elif way == 6:
            data[at:end] = bytes(end - at)
        elif way == 7:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[at:end] = other[start : start + rng.choice([4, 32, 500])]
        elif at + 8 <= len(data):
            struct.pack_into(rng.choice(["<i", "<q", ">i"]), data, at, rng.choice([-1, 1 << 30, 3, -(1 << 31)]))
    return bytes(data)


# Pickles


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def name_of(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + b"R"


def rebuild(kind: str, *args: bytes) -> bytes:
    return call(name_of("torch._utils", f"_rebuild_{kind}"), *args)


def storage_ref(kind: str = "FloatStorage", key: str = "0", numel: int = 4, old: bool = False) -> bytes:
    view = [b"N"] if old else []
    parts = [text("storage"), name_of("torch", kind), text(key), text("cpu"), number(numel)]
    return tuple_of(*parts, *view) + b"Q"


NO_HOOKS = call(name_of("collections", "OrderedDict"))


def tensor(storage: bytes, offset: int = 0, shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,)) -> bytes:
    place = (number(offset), tuple_of(*map(number, shape)), tuple_of(*map(number, strides)))
    return rebuild("tensor_v2", storage, *place, b"\x89", NO_HOOKS)


class PickleMaker:
    """Makes pickles that have the right form and a wrong meaning, with operations of newer protocols if ``modern``."""

    def __init__(self, rng: random.Random, old: bool = False, modern: bool = False) -> None:
        self.rng, self.modern = rng, modern
        self.old = old  # references to storages have the form of the format before 1.6

    def integer(self) -> bytes:
        return number(self.rng.choice(EDGES)) if self.rng.random() < 0.4 else number(self.rng.randrange(6))

    def name(self) -> bytes:
        module, name = self.rng.choice(_names(ALLOWED if self.rng.random() < 0.75 else DANGEROUS))
        if self.modern and self.rng.random() < 0.5:
            return _short(module) + _short(name) + b"\x93"
        return name_of(module, name)

    def storage(self) -> bytes:
        kinds = {"FloatStorage": 4, "LongStorage": 2, "ByteStorage": 16, "QInt8Storage": 16, "BoolStorage": 16}
        kind, width = self.rng.choice([*kinds.items()])
        if self.rng.random() < 0.15:
            return tuple_of(text("storage"), self.value(3), self.value(3), self.value(3), self.value(3)) + b"Q"
        numel = self.rng.choice(EDGES) if self.rng.random() < 0.15 else width
        return storage_ref(kind, {4: "0", 2: "1", 16: "2"}[width], numel, self.old)

    def numbers(self, count: int) -> bytes:
        return tuple_of(*(self.integer() for _ in range(count)))

    def hooks(self) -> bytes:
        return NO_HOOKS if self.rng.random() < 0.9 else self.value(3)

    def tensor(self) -> bytes:
        count = self.rng.randrange(3)
        args = [self.storage(), self.integer(), self.numbers(count), self.numbers(count), b"\x89", self.hooks()]
        version = self.rng.choice(["", "_v2", "_v2", "_v3"])
        args = args[:4] if not version else [*args, name_of("torch", "float32")] if version == "_v3" else args
        return rebuild(f"tensor{version}", *args)

    def special_tensor(self) -> bytes:
        rng = self.rng
        layout = call(name_of("torch.serialization", "_get_layout"), text(f"torch.sparse_{rng.choice(['coo', 'csr'])}"))
        values, two = tensor(storage_ref(old=self.old)), storage_ref("LongStorage", "1", 2, self.old)
        size = call(name_of("torch", "Size"), self.numbers(rng.randrange(1, 3)))
        way = rng.randrange(6)
        if way == 0:
            data = [tensor(two, 0, (1, 2), (2, 1)), values, size, b"\x88"]
            return rebuild("sparse_tensor", layout, tuple_of(*data[: rng.randint(2, 4)]))
        if way == 1:
            flat = tensor(two, 0, (2,))
            return rebuild("sparse_tensor", layout, tuple_of(flat, flat, values, size))
        if way == 2:
            quantizer = tuple_of(name_of("torch", "per_channel_affine"), values, values, self.integer())
            if rng.random() < 0.5:
                quantizer = tuple_of(name_of("torch", "per_tensor_affine"), self.atom(), self.integer())
            args = [storage_ref("QInt8Storage", "2", 16, self.old), self.integer(), self.numbers(1), self.numbers(1)]
            return rebuild("qtensor", *args, quantizer, b"\x89", self.hooks())
        if way == 3:
            dtype = name_of("torch", "float32")
            return rebuild("meta_tensor_no_storage", dtype, self.numbers(2), self.numbers(2), b"\x89")
        if way == 4:
            function = name_of("torch._utils", "_rebuild_tensor_v2")
            args = [self.storage(), number(0), self.numbers(1), self.numbers(1), b"\x89", self.hooks()]
            state = tuple_of(b"N", b"}(" + self.atom() + self.value(2) + b"u")
            kind = name_of("torch.nn.parameter", "Parameter") if rng.random() < 0.7 else self.name()
            return call(name_of("torch._tensor", "_rebuild_from_type_v2"), function, kind, tuple_of(*args), state)
        state = b"}(" + self.atom() + self.value(2) + b"u"
        return rebuild("parameter_with_state", values, b"\x88", self.hooks(), state)

    def array(self) -> bytes:
        rng = self.rng
        code = rng.choice(["f4", "O", "|O8", "V8", "U2", "(2,3)f4", "i8", "M8[ns]", "f4,f4", "S0"])
        dtype = call(name_of("numpy", "dtype"), text(code), b"\x89", b"\x88")
        if rng.random() < 0.7:
            order = text(rng.choice("<>|=!"))
            flags = rng.choice([number(0), number(63), number(1), self.integer()])
            extra = [rng.choice([b"N", self.value(3)]) for _ in range(3)]
            dtype += tuple_of(number(3), order, *extra, self.integer(), self.integer(), flags) + b"b"
        if rng.random() < 0.3:
            return call(name_of("numpy._core.multiarray", "scalar"), dtype, self.raw())
        reconstruct = name_of("numpy._core.multiarray", "_reconstruct")
        begin = call(reconstruct, name_of("numpy", "ndarray"), b"K\0\x85", self.raw())
        content = self.raw() if rng.random() < 0.6 else b"](" + self.value(2) + self.value(2) + b"e"
        return begin + tuple_of(number(1), self.numbers(1), dtype, b"\x89", content) + b"b"

    def raw(self) -> bytes:
        count = self.rng.choice([0, 1, 4, 8, 16])
        return call(name_of("_codecs", "encode"), text("\x41" * count), text("latin1"))

    def atom(self) -> bytes:
        way = self.rng.randrange(5)
        if way == 0:
            return self.rng.choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f"])
        if way == 1:
            return b"G" + struct.pack(">d", self.rng.choice([0.5, float("nan"), float("inf"), -1.0, 1e300]))
        return text(self.rng.choice(TEXTS)) if way < 4 else self.integer()

    def bomb(self) -> bytes:
        """Values nested so deeply that code which descends into them could end the process."""
        tuples = b")" + b"\x85" * self.rng.choice([400, 200_000])
        lists = b"]" * 20_000 + b"a" * 19_999
        return self.rng.choice([b"}" + tuples + b"Ns", tuples, lists, b"(" * 20_000])

    def value(self, depth: int = 0) -> bytes:
        rng = self.rng
        if depth > 3:
            return self.atom()
        ways: list[Callable[[], bytes]] = [
            self.atom,
            self.name,
            self.tensor,
            self.special_tensor,
            self.array,
            lambda: tuple_of(*(self.value(depth + 1) for _ in range(rng.randrange(4)))),
            lambda: b"](" + b"".join(self.value(depth + 1) for _ in range(rng.randrange(4))) + b"e",
            lambda: b"}(" + b"".join(self.atom() + self.value(depth + 1) for _ in range(rng.randrange(4))) + b"u",
            lambda: call(self.name(), *(self.value(depth + 1) for _ in range(rng.randrange(5)))),
            lambda: self.name() + tuple_of(*(self.value(depth + 1) for _ in range(rng.randrange(3)))) + b"\x81",
            lambda: self.value(depth + 1) + self.value(depth + 1) + b"b",
            self.storage,
        ]
        if depth == 0 and rng.random() < 0.1:
            return self.bomb()
        return rng.choice(ways)()

    def state(self) -> bytes:
        """A whole pickle: a dict as a checkpoint has it, with made-up values."""
        keys = ["models_state_dict", "optimizers_state_dict", "lr_schedulers_state_dict", "callbacks", "rng_state"]
        entries = b"".join(text(key) + self.value() for key in self.rng.sample(keys, self.rng.randint(1, 3)))
        return b"\x80\x02}(" + entries + b"u."


def _short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def made_up_pickle(rng: random.Random) -> bytes:
    maker = PickleMaker(rng, modern=True)
    return b"\x80\x04}(" + b"".join(text(name) + maker.value() for name in rng.sample(TEXTS, 2)) + b"u."


def change_pickle(rng: random.Random, content: bytes, old: bool = False, modern: bool = False) -> bytes:
    """Put something in between the operations of a pickle, or change the argument of one."""
    operations = _operations(content)
    if not operations:
        return content
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, (operation, argument, begin, end) = rng.randrange(len(operations)), rng.choice(operations)
        begin = operations[at][2] if rng.random() < 0.5 else begin
        way = rng.randrange(6)
        maker = PickleMaker(rng, old, modern)
        if way == 0:
            content = content[:begin] + maker.value(2) + content[begin:]
        elif way == 1:
            inserted = rng.choice([b"0", b"2", b"R", b"b", b"s", b"u", b"e", b"\x81", b"Q", b"t", b"1"])
            content = content[:begin] + inserted + content[begin:]
        elif way == 2:
            content = content[:begin] + content[end:] if end > begin else content
        elif way == 3 and isinstance(argument, int) and not isinstance(argument, bool):
            replaced = _with_argument(operation, rng)
            content = content[: operations[at][2]] + replaced + content[operations[at][2] :] if replaced else content
        else:
            kinds = ("GLOBAL",) if way == 4 else ("BININT1", "BININT2", "BININT", "LONG1", "INT", "LONG")
            if found := [one for one in operations if one[0] in kinds]:
                _, _, begin, end = rng.choice(found)
                names = _names(ALLOWED + "\n" + DANGEROUS)
                other = name_of(*rng.choice(names)) if way == 4 else number(rng.choice(EDGES))
                content = content[:begin] + other + content[end:]
        operations = _operations(content) or operations
    return content


def _with_argument(operation: str, rng: random.Random) -> bytes:
    value = rng.choice([0, 1, 7, 255, 1 << 16, 1 << 28, (1 << 32) - 1])
    codes = {"BINPUT": b"q", "BINGET": b"h", "LONG_BINPUT": b"r", "LONG_BINGET": b"j", "BINUNICODE": b"X"}
    code = codes.get(operation, rng.choice([b"r", b"j", b"X", b"B", b"\x8e", b"\x96", b"\x8d", b"\x8b"]))
    width = {b"q": "<B", b"h": "<B", b"\x8e": "<Q", b"\x96": "<Q", b"\x8d": "<Q"}.get(code, "<I")
    return code + struct.pack(width, value & (255 if width == "<B" else 0xFFFFFFFF))


def _operations(content: bytes) -> list[tuple[str, Any, int, int]]:
    found: list[tuple[str, Any, Any]] = []
    try:
        found = [(op.name, argument, at) for op, argument, at in pickletools.genops(content)]
    except Exception:  # what could be told before the damage is enough
        return []
    ends = [at for _, _, at in found[1:]] + [found[-1][2] + 1]
    return [(name, argument, at or 0, end or 0) for (name, argument, at), end in zip(found, ends, strict=True)]


# Files of torch.save


def change_state_file(rng: random.Random, content: bytes) -> bytes:
    """Change the pickle in a file that ``torch.save`` wrote, and leave all around it as it should be."""
    if content[:4] != b"PK\x03\x04":
        return _change_old_format(rng, content)
    if rng.random() >= 0.5:
        return made_up_archive(PickleMaker(rng).state())
    entries = entries_of(content)
    return zip_of([(name, change_pickle(rng, data) if name.endswith("data.pkl") else data) for name, data in entries])


def made_up_state(value: bytes, old: bool = False) -> bytes:
    """Return a file with this value as ``w``; in the format before 1.6 references to storages have another form."""
    pickled = b"\x80\x02}" + text("w") + (value.replace(b"tQ", b"NtQ") if old else value) + b"s."
    return made_up_old_file(pickled) if old else made_up_archive(pickled)


def made_up_archive(pickled: bytes) -> bytes:
    """Return an archive with this pickle and three storages: ``0`` and ``1`` and ``2``, of 16 bytes each."""
    storages = [(f"archive/data/{key}", (b"\xff" if key else b"\x01\0") * (8 if key == 0 else 16)) for key in range(3)]
    head = [("archive/data.pkl", pickled), ("archive/byteorder", b"little")]
    return zip_of([*head, *storages, ("archive/version", b"3\n")])


def entries_of(content: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def zip_of(entries: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def archive_with_two_lists(listed: list[tuple[str, bytes]], hidden: list[tuple[str, bytes]], small: bool) -> bytes:
    """Return an archive whose end leads to one list of entries, and whose ZIP64 locator to another one.

    Args:
        listed: entries in the list that stands where it should be.
        hidden: entries in the other one.
        small: the end of the archive names the first list itself; otherwise it leaves that to the record before it.
    """
    parts: list[bytes] = []
    lines: list[tuple[int, Any, Any]] = []
    for entries in (hidden, listed):
        base, packed = sum(map(len, parts)), zip_of(entries)
        length, begin = struct.unpack("<II", packed[-10:-2])
        directory = bytearray(packed[begin : begin + length])
        for at in _find_all(packed[begin : begin + length], b"PK\x01\x02"):
            struct.pack_into("<I", directory, at + 42, struct.unpack_from("<I", directory, at + 42)[0] + base)
        counts = (len(entries), len(entries), length, base + begin)
        record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *counts)
        parts.append(packed[:begin] + directory + record)
        lines.append((len(entries), length, base + begin))
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(parts[0]) - 56, 1)
    count, length, begin = lines[1] if small else (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return b"".join(parts) + locator + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, length, begin, 0)


def _old_parts(content: bytes) -> tuple[list[bytes], bytes]:
    file, parts = io.BytesIO(content), []
    for _ in range(5):
        begin = file.tell()
        for _ in pickletools.genops(file):
            pass
        parts.append(content[begin : file.tell()])
    return parts, content[file.tell() :]


def _change_old_format(rng: random.Random, content: bytes) -> bytes:
    parts, data = _old_parts(content)
    if rng.random() < 0.5:
        which = rng.choice([3, 3, 3, 4, 2])
        parts[which] = change_pickle(rng, parts[which], old=True)
        return b"".join(parts) + data
    return made_up_old_file(PickleMaker(rng, old=True).state(), parts[:3])


def made_up_old_file(pickled: bytes, head: list[bytes] | None = None) -> bytes:
    """Return a file of the format before 1.6 with this pickle and the storages of :func:`made_up_archive`."""
    if head is None:
        empty = io.BytesIO()
        torch.save({}, empty, _use_new_zipfile_serialization=False)
        head = _old_parts(empty.getvalue())[0][:3]
    widths = {"0": (4, 16), "1": (2, 16), "2": (16, 16)}
    used = sorted(key for key in widths if text(key) in pickled)
    content = b"".join(struct.pack("<q", widths[key][0]) + b"\x01" * widths[key][1] for key in used)
    return b"".join(head) + pickled + pickle.dumps(used, 2) + content


def change_archive(rng: random.Random, content: bytes) -> bytes:
    """Change what an archive says of its entries."""
    entries = entries_of(content)
    way = rng.randrange(10)
    at = rng.randrange(len(entries))
    name, data = entries[at]
    if way == 0:
        entries[at] = (name, data[: rng.randrange(len(data) + 1)] + bytes(rng.choice([0, 0, 1, 8])))
    elif way == 1:
        twin = name.upper() if rng.random() < 0.5 else name
        entries.append((twin, rng.choice([b"", rng.choice(entries)[1], PickleMaker(rng).state()])))
    elif way == 2:
        names = ["../../x", "/etc/x", "x", "archive/constants.pkl", name + "\0y", "é/data.pkl"]
        entries[at] = (rng.choice(names), data)
    elif way == 3:
        del entries[at]
    elif way == 4:
        rng.shuffle(entries)
    elif way == 5:
        added = rng.choice([".format_version", "byteorder", "constants.pkl"])
        entries.append((f"{name.partition('/')[0]}/{added}", b"big"))
    packed = zip_of(entries)
    if way == 8:
        other = [(name, PickleMaker(rng).state() if name.endswith("data.pkl") else data) for name, data in entries]
        listed, hidden = rng.sample([entries, other], 2)
        return archive_with_two_lists(listed, hidden, small=rng.random() < 0.5)
    if way == 9:
        return in_one_place(packed)
    if way == 6:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries:
                archive.writestr(name, bytes(20_000_000) if rng.random() < 0.1 else data)
        return buffer.getvalue()
    if way == 7:  # sizes, offsets and checksums, of the entries and of the list
        patched = bytearray(packed)
        places = [i for magic in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06") for i in _find_all(packed, magic)]
        for _ in range(rng.randint(1, 3)):
            field = rng.choice(places) + rng.randrange(4, 44)
            patched[field : field + 4] = struct.pack("<I", rng.choice(EDGES) & 0xFFFFFFFF)[: rng.choice([1, 2, 4])]
        return bytes(patched)
    return packed


def in_one_place(packed: bytes) -> bytes:
    """Return an archive whose list says that all entries lie in the same place."""
    patched = bytearray(packed)
    for place in _find_all(packed, b"PK\x01\x02"):
        patched[place + 42 : place + 46] = bytes(4)
    return bytes(patched)


def _find_all(content: bytes, part: bytes) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(part), content)]


# JSON


def change_json(rng: random.Random, content: bytes) -> bytes:
    """Change the values of a JSON file, or its form."""
    values: list[Any] = [None, True, -1, 0.5, float("nan"), 1e308, 10**400, "", "x" * 300, [], {}, [[]], {"bytes": 1}]
    values += ["../x", "/etc/passwd", "a\0b", "\ud800", "a/" * 3000, {"a/" * 3000: {"bytes": 1, "crc32c": "0"}}, "m:T"]
    way = rng.randrange(6)
    if way == 0:
        depth = rng.choice([10, 1000, 200_000])
        return rng.choice([b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth])
    if way == 1:
        return content[:-1] + b', "hparams": ' + b"9" * rng.choice([30, 5000]) + b"}"
    if way == 2:
        return content[:-1] + b", " + content[1:]
    try:
        parsed = json.loads(content)
    except ValueError:
        return content
    target = parsed
    while isinstance(target, dict | list) and target and rng.random() < 0.6:
        key = rng.choice(list(target)) if isinstance(target, dict) else rng.randrange(len(target))
        if not isinstance(target[key], dict | list) or not target[key]:
            break
        target = target[key]
    if isinstance(target, dict):
        key = rng.choice([*target, *target, "files", "..", "a\0b", "x" * 5000])
        target[key] = rng.choice(values)
        if rng.random() < 0.2:
            target.pop(rng.choice(list(target)))
    elif isinstance(target, list):
        target.insert(0, rng.choice(values))
    return json.dumps(rng.choice(values) if way == 3 and rng.random() < 0.3 else parsed).encode()


# All of it


def make_input(corpus: dict[str, Files], seed: int, index: int) -> tuple[str, Files]:
    """Return what was done to one of the checkpoints, and its files."""
    rng = random.Random(f"{seed}/{index}")
    source = rng.choice(list(corpus))
    files = dict(corpus[source])
    name = rng.choice([*files, next(one for one in files if one.endswith((".pth", ".pt")))])
    content = files[name]
    is_state = name.endswith((".pth", ".pt"))
    ways = ["bytes", "bytes", "swap"]
    if name.endswith(".json"):
        ways += ["json"] * 6
    elif name.endswith(".pkl"):
        ways += ["pickle"] * 4 + ["made-up pickle"] * 2
    else:
        ways += ["state file"] * 9 + (["archive"] * 3 if content[:4] == b"PK\x03\x04" else [])
    way = rng.choice(ways)
    changes: dict[str, Callable[[], bytes]] = {
        "bytes": lambda: change_bytes(rng, content, [data for data in files.values() if data]),
        "swap": lambda: rng.choice([data for one in corpus.values() for data in one.values()]),
        "json": lambda: change_json(rng, content),
        "pickle": lambda: change_pickle(rng, content, modern=True),
        "made-up pickle": lambda: made_up_pickle(rng),
        "state file": lambda: change_state_file(rng, content),
        "archive": lambda: change_archive(rng, content),
    }
    files[name] = changes[way]()
    if is_state and source == "with a manifest" and rng.random() < 0.5:
        del files["metadata.json"]
    return f"{way} of {Path(name).name}", files


def write_files(directory: Path, files: Files) -> None:
    """Write a checkpoint into ``directory``, which is emptied before."""
    if directory.parent.exists():
        shutil.rmtree(directory.parent)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    directory.mkdir(parents=True, exist_ok=True)
