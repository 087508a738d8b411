"""Of an archive the check and torch see the same bytes, or it is refused, and so are parts that their index belies."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning import errors
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.exports import merge_checkpoint
from det_lightning.checkpoint.format.layout import STAGING_MARK
from det_lightning.checkpoint.safe_load import read_state
from det_lightning.checkpoint.storage.staging import StagingDirectory, remove_dead_stagings
from tests.checkpoint.made_checkpoints import write_checkpoint
from tests.soak import mutations
from tests.soak.mutations import storage_ref, tensor, text

# A reader that waited for the other end of a pipe would never end.
pytestmark = pytest.mark.timeout(60)

HARMLESS = b"\x80\x02}" + text("w") + b"K\x01s."
OTHER = b"\x80\x02}" + text("w") + b"K\x02s."


def entries_with(pickled: bytes) -> list[tuple[str, bytes]]:
    return [("archive/data.pkl", pickled), ("archive/data/0", b"x" * 64), ("archive/version", b"3\n")]


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(errors.IncompleteCheckpointError) as raised:
        read_state(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("small", [True, False])
def test_archive_with_two_lists_is_refused(small: bool, tmp_path: Path) -> None:
    for listed, hidden in ((HARMLESS, OTHER), (OTHER, HARMLESS)):
        content = mutations.archive_with_two_lists(entries_with(listed), entries_with(hidden), small)
        assert "two lists of its entries" in refused(tmp_path / "state.pth", content)
    torch.save({"w": torch.ones(3)}, tmp_path / "state.pth")
    contradicting = bytearray((tmp_path / "state.pth").read_bytes())
    struct.pack_into("<I", contradicting, len(contradicting) - 6, 0)
    assert "two lists of its entries" in refused(tmp_path / "other.pth", bytes(contradicting))


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    content = mutations.in_one_place(mutations.zip_of([(f"archive/data/{i}", b"x" * 64) for i in range(3)]))
    assert "differs from the archive's list" in refused(tmp_path / "state.pth", content)


PICKLE, VERSION = ("archive/data.pkl", HARMLESS), ("archive/version", b"3\n")
STRANGE = {
    "two roots": ([PICKLE, ("Archive/version", b"3\n")], "one directory"),
    "capitals": ([PICKLE, ("archive/DATA.PKL", OTHER)], "twice"),
    "a name twice": ([PICKLE, PICKLE], "twice"),
    "a zero byte in the name": ([PICKLE, ("archive/data.pklX", OTHER)], "twice"),
    "no pickle": ([VERSION], "holds no data.pkl"),
    "no byte order": ([PICKLE, ("archive/byteorder", b"middle"), VERSION], "middle"),
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_that_torch_never_writes_are_refused(name: str, tmp_path: Path) -> None:
    entries, message = STRANGE[name]
    content = mutations.zip_of(entries).replace(b"data.pklX", b"data.pkl\0")
    assert message in refused(tmp_path / "state.pth", content)


def test_archive_is_the_whole_file(tmp_path: Path) -> None:
    archive = mutations.zip_of(entries_with(HARMLESS))
    for content in (archive + b"x" * 50, archive[:4] + b"x" * 50 + archive, archive[:-22] + b"x" + archive[-22:]):
        refused(tmp_path / "state.pth", content)


def test_packed_archive_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", HARMLESS)
        archive.writestr("archive/data/0", bytes(50_000_000))
    assert "declares 50,000" in refused(tmp_path / "state.pth", buffer.getvalue())


def test_program_entries_have_no_effect(tmp_path: Path) -> None:
    content = mutations.zip_of([*entries_with(HARMLESS), ("archive/constants.pkl", OTHER), ("archive/code/x.py", b"")])
    (tmp_path / "state.pth").write_bytes(content)
    assert read_state(tmp_path / "state.pth") == {"w": 1}


def test_old_format_is_no_tar_archive(tmp_path: Path) -> None:
    """Before its first release torch wrote tar archives; a file can be one of those and of the format after it."""
    head = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X"
    member = tarfile.TarInfo("placeholder")
    member.size = 0
    block = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    block[: len(head) + 4] = head + struct.pack("<I", 512 - len(head) - 4)
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    (tmp_path / "state.pth").write_bytes(bytes(block) + b"Ns." + HARMLESS + b"\x80\x02]." + bytes(1024))
    assert read_state(tmp_path / "state.pth") == {"w": 1}


def test_damage_in_any_entry_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    torch.save({"w": torch.arange(1000), "large": torch.zeros(700_000)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    assert {"state/data.pkl", "state/version", "state/data/0", "state/data/1"} <= entries.keys()
    for entry in entries.values():
        content = bytearray(path.read_bytes())
        begin = entry.header_offset + 30 + sum(struct.unpack_from("<2H", content, entry.header_offset + 26))
        for position in {begin, begin + entry.file_size // 2, begin + entry.file_size - 1}:
            content[position] ^= 1
            assert "checksum" in refused(tmp_path / "other.pth", bytes(content))
            content[position] ^= 1


@pytest.mark.parametrize("trusted", [False, True])
def test_archive_without_checksums_is_read(trusted: bool, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(3)}, tmp_path / "state.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_state(tmp_path / "state.pth", trusted=trusted)["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", [{"map_location": "meta"}, {"weights_only": False}])
def test_damage_in_unread_entries_is_found(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    torch.save({"w": torch.full((700_000,), 3.0)}, path)
    assert read_state(path, **options)["w"].shape == (700_000,)
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", 3.0) * 10)] ^= 1
    path.write_bytes(content)
    with pytest.raises(errors.IncompleteCheckpointError, match="checksums of 1 entries differ"):
        read_state(path, **options)


def test_file_is_read_as_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pth"
    path.write_bytes(mutations.zip_of(entries_with(HARMLESS)))
    load = torch.load

    def rewrite_and_load(*args: Any, **kwargs: Any) -> Any:
        path.write_bytes(mutations.zip_of(entries_with(OTHER)))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", rewrite_and_load)
    assert read_state(path) == {"w": 1}


def test_mmap_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    torch.save({"w": torch.arange(1000), "n": np.arange(3)}, path)
    read = read_state(path, mmap=True)["w"]
    path.write_bytes(b"")
    assert torch.equal(read, torch.arange(1000))


@pytest.mark.parametrize("map_location", ["cpu", None, lambda storage, _: storage], ids=["cpu", "same", "function"])
def test_tensors_of_all_sizes_come_back(map_location: object, tmp_path: Path) -> None:
    state = {f"w{size}": torch.randn(size) for size in (0, 1, 10_000, 300_000, 700_000)}
    state |= {"view": state["w300000"][100:200], "sparse": torch.eye(3).to_sparse()}
    torch.save(state, tmp_path / "state.pth")
    stream = io.BytesIO((tmp_path / "state.pth").read_bytes())
    for file in (tmp_path / "state.pth", stream):
        found = read_state(file, map_location=map_location, name="the file")
        assert all(torch.equal(found[name].to_dense(), state[name].to_dense()) for name in state)
        assert found["view"].untyped_storage().data_ptr() == found["w300000"].untyped_storage().data_ptr()


def test_damaged_stream_is_named() -> None:
    with pytest.raises(errors.IncompleteCheckpointError, match="the stream cannot be read"):
        read_state(io.BytesIO(b"PK"), name="the stream")


def test_refused_storage_is_named(tmp_path: Path) -> None:
    content = mutations.made_up_state(tensor(storage_ref(numel=10**6), shape=(1,)))
    assert "must have 4,000,000 bytes" in refused(tmp_path / "state.pth", content)


# Sharded checkpoints that nobody has written: indexes that lie, and files that are none


def sharded(folder: Path, shape: tuple[int, ...], part: list[Any]) -> Path:
    """Return a checkpoint with one tensor, of which the index says that ``part`` is all."""
    checkpoint = write_checkpoint(folder)
    state = torch.load(checkpoint / "state_dict.pth", weights_only=False)
    state["models_state_dict"] = [{"weight": torch.empty(shape, device="meta")}]
    shards = checkpoint / "shards"
    shards.mkdir()
    torch.save(state, shards / "state.pth")
    parts = {"state.models_state_dict.0.weight": part}
    (shards / "index-00000.json").write_text(json.dumps({"version": 1, "parts": parts}))
    for name in ("state_dict.pth", "resume.pth"):
        (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / "metadata.json").write_text(json.dumps({"steps_completed": 1}))
    return checkpoint


def sound(folder: Path) -> Path:
    """Return a checkpoint with a tensor of ones in one part."""
    torch.save(torch.ones(2, 3), folder / "part")
    size = (folder / "part").stat().st_size
    checkpoint = sharded(folder / "storage", (2, 3), [0, 0, 2, "__0_0.distcp", 0, size])
    return (folder / "part").rename(checkpoint / "shards" / "__0_0.distcp").parents[1]


def test_what_the_index_says_is_read(tmp_path: Path) -> None:
    """Without this the tests below could pass for another reason."""
    assert torch.equal(load_checkpoint(sound(tmp_path)).state["models_state_dict"][0]["weight"], torch.ones(2, 3))


def test_merge_survives_a_cleanup(tmp_path: Path) -> None:
    class Busy(CheckpointStorage):
        def stage(self, checkpoint_id: str | None = None) -> StagingDirectory:
            remove_dead_stagings()  # as another run does when it begins
            return super().stage(checkpoint_id)

    checkpoint = sound(tmp_path)
    (checkpoint / "code" / STAGING_MARK).write_text("")
    (checkpoint / "code" / ".gitignore").write_text("package/\n")  # an imported module had been copied all the same
    merged = merge_checkpoint(checkpoint, Busy(tmp_path / "merged"))
    assert {path.name for path in (tmp_path / "merged" / merged / "code").iterdir()} >= {"model_def.py", "package"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_pipe_in_place_of_a_part_is_refused(tmp_path: Path) -> None:
    """Opening one waits for a writer."""
    checkpoint = sharded(tmp_path, (0, 5), [1, 0, 5, "__0_0.distcp", 0, 0])
    os.mkfifo(checkpoint / "shards" / "__0_0.distcp")
    with pytest.raises(errors.IncompleteCheckpointError, match=r"__0_0\.distcp must be a file of at least 0 bytes"):
        load_checkpoint(checkpoint)


def test_tensor_larger_than_memory_is_refused(tmp_path: Path) -> None:
    size = 2**43
    checkpoint = sharded(tmp_path, (size // 4,), [0, 0, size // 4, "__0_0.distcp", 0, size])
    with (checkpoint / "shards" / "__0_0.distcp").open("wb") as sparse:
        sparse.truncate(size)
    with pytest.raises(errors.CheckpointError, match=r"weight|__0_0\.distcp"):
        load_checkpoint(checkpoint)


WRONG_NUMBERS: list[list[Any]] = [[0, -1, 3, 0, 10], [9, 0, 2, 0, 10], [0, 0, 2, 2**80, 10], [0, 0, 2, 0, 2**80]]
WRONG_NUMBERS += [[0, 0, True, 0, 10], [0, 1, 1, 0, 10], [0, 0, 2.0, 0, 10]]
WRONG_PARTS: list[Any] = [[*numbers[:3], "__0_0.distcp", *numbers[3:]] for numbers in WRONG_NUMBERS]
WRONG_PARTS += [[0, 0, 2, "../state.pth", 0, 10], [0, 0, 2, "__0_0.distcp\n", 0, 10], {"dim": 0}, None]


@pytest.mark.parametrize("part", WRONG_PARTS, ids=str)
def test_part_that_cannot_be_is_refused(part: Any, tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path, (2, 3), part)
    (checkpoint / "shards" / "__0_0.distcp").write_bytes(b"x" * 100)
    with pytest.raises(errors.IncompleteCheckpointError, match=r"index-00000\.json|__0_0\.distcp|do not make up"):
        load_checkpoint(checkpoint)
