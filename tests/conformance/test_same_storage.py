"""Where Determined puts checkpoints is where they are found, and it finds ours."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.checkpoint import CheckpointStorage, load_checkpoint, open_checkpoint
from det_lightning.checkpoint.storage.storage_config import storage_from_config
from tests.checkpoint.made_checkpoints import assert_equal
from tests.checkpoint.storage.backends import STATE, files_of, new_bucket
from tests.conformance.sides import outcome

determined_storage = pytest.importorskip("determined.common.storage")
determined_prefix = pytest.importorskip("determined.common.storage._util")

PARTS = st.lists(st.sampled_from(["", ".", "..", "a", "b", "..."]), max_size=5).map("/".join)


def path_of_determined(config: dict[str, Any]) -> str:
    return os.path.normpath(determined_storage.build(config, container_path=None)._base_path)


@given(
    host_path=PARTS.map(lambda path: f"/data/{path}".rstrip("/.") or "/data"),
    paths=st.dictionaries(
        st.sampled_from(["storage_path", "checkpoint_path", "tensorboard_path"]),
        PARTS | PARTS.map(lambda path: f"/data/{path}"),
    ),
)
def test_shared_fs_is_the_same_directory(host_path: str, paths: dict[str, str]) -> None:
    host_path = os.path.normpath(host_path)
    config = {"type": "shared_fs", "host_path": host_path, **paths}
    theirs = outcome(lambda: path_of_determined(config))
    if not Path(theirs).is_relative_to(host_path):
        # It raises, too; but knowingly different: for it /database lies under /data.
        with pytest.raises(ValueError, match="must lie under host_path"):
            storage_from_config(config)
        return
    assert storage_from_config(config) == (theirs, {})


@pytest.mark.parametrize(
    "extra", [{}, {"save_trial_best": 2}, {"tensorboard_path": "x", "checkpoint_path": "y"}], ids=str
)
def test_directory_is_the_same_directory(extra: dict[str, Any]) -> None:
    config = {"type": "directory", "container_path": "/data/here", **extra}
    assert storage_from_config(config) == (path_of_determined(config), {})


@given(prefix=PARTS)
def test_a_prefix_is_the_same_prefix(prefix: str) -> None:
    config = {"type": "s3", "bucket": "b", "prefix": prefix}
    try:
        theirs = determined_prefix.normalize_prefix(prefix)
    except ValueError:
        with pytest.raises(ValueError, match=r"prefix must not contain '\.\.'"):
            storage_from_config(config)
        return
    # Knowingly different: with the prefix "." it begins its keys with "./".
    expected = "" if theirs == "." else theirs
    assert storage_from_config(config)[0] == "/".join(["s3://b", *filter(None, [expected])])


@pytest.fixture(params=["shared_fs", "directory", "s3", "s3 without a prefix"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "shared_fs":
        return {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "team"}
    if request.param == "directory":
        return {"type": "directory", "container_path": str(tmp_path / "here")}
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # boto3 asks for one, also where there are keys.
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    options = request.getfixturevalue("s3_options")
    return {
        "type": "s3",
        "bucket": new_bucket("s3", options),
        "endpoint_url": options["endpoint_url"],
        "access_key": options["key"],
        "secret_key": options["secret"],
        **({"prefix": "/team//run/"} if request.param == "s3" else {}),
    }


def test_what_determined_stored_is_simply_opened(config: dict[str, Any], tmp_path: Path) -> None:
    local = CheckpointStorage(tmp_path / "elsewhere")
    Path("package/empty").mkdir(parents=True)
    Path("package/model.py").write_text("the code")
    written = local.root.local_path / local.write(files_of())
    (written / "code/package/empty").mkdir(exist_ok=True)
    checkpoint_id = str(uuid.uuid4())
    determined_storage.build(config, container_path=None).upload(written, checkpoint_id)
    storage = CheckpointStorage(config)
    assert storage.list_ids(complete=False) == [checkpoint_id]
    assert storage.newest() == storage.find(checkpoint_id)
    with open_checkpoint(storage.find(checkpoint_id), storage.options, with_code=True) as directory:
        assert_equal(load_checkpoint(directory).state, STATE)
        assert (directory / "code/package/model.py").read_text() == "the code"
    info = storage.info(checkpoint_id)
    assert info.complete
    storage.delete(checkpoint_id)
    assert checkpoint_id not in storage.list_ids(complete=False)


def test_determined_finds_what_we_stored(config: dict[str, Any], tmp_path: Path) -> None:
    storage = CheckpointStorage(config)
    checkpoint_id = storage.write(files_of())
    theirs = determined_storage.build(config, container_path=None)
    target = tmp_path / "downloaded"
    target.mkdir()
    theirs.download(checkpoint_id, target)
    assert_equal(load_checkpoint(target).state, STATE)
    theirs.delete(checkpoint_id, ["**/*"])
    assert storage.list_ids(complete=False) == []
