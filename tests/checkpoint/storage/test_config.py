"""Determined's ``checkpoint_storage`` section becomes a URL and options of its file system."""

from __future__ import annotations

import os
import traceback
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning import pytorch
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.checkpoint.storage.storage_config import EXTRAS, storage_from_config
from det_lightning.errors import StorageError
from det_lightning.masking import MASK
from tests.checkpoint.storage.backends import write
from tests.trials import fit_trial

KEYS = {"endpoint_url": "http://u", "access_key": "a", "secret_key": "b", "session_token": "c"}


@pytest.mark.parametrize(
    ("section", "url"),
    [
        ({}, "/data"),
        ({"host_path": "/data/"}, "/data"),
        ({"storage_path": "a/b"}, "/data/a/b"),
        ({"storage_path": None}, "/data"),
        ({"storage_path": "/data/a"}, "/data/a"),
        ({"checkpoint_path": "old"}, "/data/old"),
        ({"checkpoint_path": "x", "tensorboard_path": "t"}, "/data/t"),
        ({"host_path": "/", "storage_path": "/data"}, "/data"),
        ({"container_path": "/mnt", "propagation": "rprivate"}, "/data"),
    ],
    ids=str,
)
def test_storage_path_is_within_the_host_path(section: dict[str, Any], url: str) -> None:
    assert storage_from_config({"type": "shared_fs", "host_path": "/data", **section}) == (url, {})


S3 = {"type": "s3", "bucket": "b"}
AZURE = {"type": "azure", "container": "c"}
ACCOUNT = {"account_host": "me.blob.core.windows.net", "account_name": "me"}


@pytest.mark.parametrize(
    ("config", "url", "options"),
    [
        ({"type": "directory", "container_path": "/data/here"}, "/data/here", {}),
        (S3, "s3://b", {}),
        ({**S3, "prefix": "/x//y/./z/"}, "s3://b/x/y/z", {}),
        ({**S3, "prefix": "..x/y.."}, "s3://b/..x/y..", {}),
        ({**S3, **KEYS}, "s3://b", {"endpoint_url": "http://u", "key": "a", "secret": "b", "token": "c"}),
        ({**S3, "save_trial_best": 3, "save_trial_latest": 0}, "s3://b", {}),
        ({"type": "gcs", "bucket": "b", "prefix": "x"}, "gs://b/x", {}),
        (AZURE, "az://c", {}),
        ({**AZURE, "connection_string": "s"}, "az://c", {"connection_string": "s"}),
        ({**AZURE, "account_url": "https://me.blob.core.windows.net/"}, "az://c", ACCOUNT),
    ],
    ids=str,
)
def test_every_type_has_its_url(config: dict[str, Any], url: str, options: dict[str, Any]) -> None:
    assert storage_from_config(config) == (url, options)


def test_remote_types_have_an_extra() -> None:
    assert {"s3", "gcs", "azure"} == {*EXTRAS.values()}
    assert {*EXTRAS.values()} <= {*metadata("det-lightning").get_all("Provides-Extra", [])}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, ["type must be one of shared_fs, directory, s3, gcs, azure; got None"]),
        ({"type": ["s3"]}, ["got ['s3']"]),
        ({"type": "s3", "bucket": None}, ["bucket is missing", "It takes bucket, and optionally prefix"]),
        ({"type": "s3", "bucket": ""}, ["bucket must not be empty"]),
        ({"type": "gcs", "bucket": 3}, ["bucket must be a string; got 3"]),
        ({"type": "directory", "container_path": "/x", "host_path": "/y"}, ["host_path is unknown"]),
        ({"type": "shared_fs", "host_path": "data"}, ["host_path must be absolute; got 'data'"]),
        (
            {"type": "s3", "prefix": "a/../b", "endpoint_url": 1, "buckets": "x"},
            [
                *("bucket is missing", "buckets is unknown (did you mean bucket?)"),
                *("endpoint_url must be a string; got 1", "prefix must not contain '..'; got 'a/../b'"),
            ],
        ),
    ],
    ids=str,
)
def test_all_mistakes_are_reported_at_once(config: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError, match="checkpoint_storage") as raised:
        CheckpointStorage(config)
    assert [part for part in said if part not in str(raised.value)] == []


@pytest.mark.parametrize("storage_path", ["/database", "..", "a/../../b"])
def test_storage_path_stays_in_host_path(storage_path: str) -> None:
    with pytest.raises(ValueError, match="storage_path must lie under host_path '/data'; got"):
        storage_from_config({"type": "shared_fs", "host_path": "/data", "storage_path": storage_path})


PARTS = st.lists(st.sampled_from(["", ".", "..", "a", "b", "a b", "..."]), max_size=6).map("/".join)


@pytest.mark.slow
@given(host_path=PARTS, storage_path=PARTS)
def test_any_path_stays_in_host_path(host_path: str, storage_path: str) -> None:
    host_path = "/" + host_path.lstrip("/")  # two slashes mean something else to POSIX
    try:
        url, _ = storage_from_config({"type": "shared_fs", "host_path": host_path, "storage_path": storage_path})
    except ValueError:
        joined = os.path.normpath(os.path.join(host_path, storage_path))  # noqa: PTH118 (as Determined does)
        assert not Path(joined).is_relative_to(os.path.normpath(host_path))
    else:
        assert Path(url).is_relative_to(os.path.normpath(host_path))


@given(prefix=PARTS)
def test_any_prefix_stays_in_the_bucket(prefix: str) -> None:
    try:
        url, _ = storage_from_config({"type": "s3", "bucket": "b", "prefix": prefix})
    except ValueError:
        assert ".." in prefix.split("/")
    else:
        assert url.split("/") == ["s3:", "", "b", *(part for part in prefix.split("/") if part not in ("", "."))]


def test_section_opens_a_directory(tmp_path: Path) -> None:
    storage = CheckpointStorage({"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "team"})
    assert storage.find(write(storage)).startswith(f"{tmp_path}/team/")


def test_options_override_the_section() -> None:
    pytest.importorskip("s3fs")
    config = {"type": "s3", "bucket": "b", "endpoint_url": "http://one", "access_key": "a"}
    storage = CheckpointStorage(config, options={"endpoint_url": "http://other"})
    assert storage.options == {"endpoint_url": "http://other", "key": "a"}


def test_password_may_be_in_the_url_or_an_option(sftp_options: dict[str, Any], tmp_path: Path) -> None:
    rest = {name: value for name, value in sftp_options.items() if name not in ("port", "username", "password")}
    host_and_path = f"127.0.0.1:{sftp_options['port']}{tmp_path}/storage"
    storage = CheckpointStorage(f"sftp://me:the password@{host_and_path}", options=rest)
    checkpoint_id = write(storage)
    assert str(storage) == f"sftp://me:{MASK}@{host_and_path}"
    load_checkpoint(storage.find(checkpoint_id), rest)
    shown = CheckpointStorage(str(storage), options={**rest, "password": "the password"})
    assert shown.list_ids() == [checkpoint_id]
    wrong = "a wrong one"
    with pytest.raises(StorageError) as raised:
        CheckpointStorage(f"sftp://me:{wrong}@{host_and_path}", options=rest)
    assert f"{wrong}@" not in "".join(traceback.format_exception(raised.value))


def test_local_storages_have_their_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert CheckpointStorage().root.local_path == tmp_path / "determined", "this is Determined's"
    assert CheckpointStorage("~/here").root.local_path == Path.home() / "here"
    with pytest.raises(ValueError, match="must not be empty: pass a directory"):
        CheckpointStorage("")


def test_default_storage_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = f"No storage of checkpoints is set: checkpoints go to {CheckpointStorage()}."
    for storage in (tmp_path, None):
        fit_trial(max_length=pytorch.Batch(1), checkpoint_storage=storage)
        assert (said in caplog.messages) == (storage is None)
        assert len(CheckpointStorage(storage).list_ids()) == 1
