"""``det_lightning.util``: what of ``determined.util`` scripts use. tests/conformance compares the rest of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from det_lightning import errors, util
from tests.checkpoint.storage.backends import gcs_server

pytestmark = [
    pytest.mark.slow,
    # google's libraries say that they will stop supporting this Python some day.
    pytest.mark.filterwarnings("ignore::FutureWarning:google"),
]


@pytest.fixture(scope="session")
def bucket() -> Iterator[Any]:
    """A bucket on a server of Google Cloud Storage, which is there until no more tests run in this process.

    After a missing blob the client looks for the bucket too, in a thread of its own. Without the server it would do so
    for minutes, with pauses that it draws from Python's generator, and so change what later tests train.
    """
    storage = pytest.importorskip("google.cloud.storage")
    pytest.importorskip("gcp_storage_emulator", reason="no GCS server to test with; install gcp-storage-emulator")
    with gcs_server() as options:
        client = storage.Client.create_anonymous_client()
        client = storage.Client(
            project=options["project"],
            credentials=client._credentials,
            client_options={"api_endpoint": options["endpoint_url"]},
        )
        yield client.create_bucket("examples")


def failing(bucket: Any, name: str, failures: int) -> Any:
    """Return a blob whose first downloads fail."""

    class Failing(pytest.importorskip("google.cloud.storage").Blob):  # type: ignore[misc]
        attempts = 0

        def download_as_bytes(self, *args: Any, **kwargs: Any) -> bytes:
            self.attempts += 1
            if self.attempts <= failures:
                raise ConnectionResetError("the connection was lost")
            return super().download_as_bytes(*args, **kwargs)

    return Failing(name, bucket)


def test_download_retries_without_random_draws(bucket: Any) -> None:
    bucket.blob("images/1").upload_from_string(b"content")
    state = random.getstate()
    blob = failing(bucket, "images/1", failures=3)
    assert util.download_gcs_blob_with_backoff(blob, max_backoff=0) == b"content"
    assert blob.attempts == 4
    assert random.getstate() == state


def test_failed_downloads_name_the_blob(bucket: Any) -> None:
    blob = failing(bucket, "images/1", failures=3)
    with pytest.raises(errors.StorageError, match=r"downloading images/1: ConnectionResetError: the conn"):
        util.download_gcs_blob_with_backoff(blob, n_retries=3, max_backoff=0)
    assert blob.attempts == 3
    blob = failing(bucket, "images/missing", failures=0)
    with pytest.raises(errors.StorageError, match="Failed while downloading images/missing"):
        util.download_gcs_blob_with_backoff(blob)
    assert blob.attempts == 1


def test_only_blobs_are_downloaded() -> None:
    with pytest.raises(TypeError, match=r"takes a google.cloud.storage.Blob; got one of type str"):
        util.download_gcs_blob_with_backoff("gs://examples/images/1")
