"""``det-lightning checkpoint`` at a place without checkpoints."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from det_lightning.checkpoint import CheckpointStorage
from det_lightning.checkpoint.storage.location import Location
from tests.checkpoint.made_checkpoints import make_files, write_checkpoint
from tests.cli import test_cli
from tests.cli.test_cli import error_of, run

COMMANDS = {
    **{name: command for name, command in test_cli.COMMANDS.items() if name != "import"},
    "ls --json": ["ls", "{}", "--json"],
    "ls --best": ["ls", "{}", "--best"],
    "annotate": ["annotate", "{}", __file__],
    "merge": ["merge", "{}"],
}


def error_at(place: object, command: str) -> str:
    return error_of(*(part.format(place) for part in COMMANDS[command]))


@pytest.fixture(params=["on a disk", "in a bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    if request.param == "on a disk":
        (tmp_path / "place").mkdir()
        yield Location.parse(tmp_path / "place")
        return
    memory = fsspec.filesystem("memory")
    yield Location.parse("memory://bucket")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_place_without_checkpoints_is_an_error(place: Location) -> None:
    (place / "code/notes.txt").write(b"no checkpoint")
    for command in COMMANDS:
        assert f"{place} holds no checkpoints" in error_at(place, command)


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers like a service whose user lacks the rights."""

    def do_GET(self) -> None:
        self.send_response_only(403)
        self.end_headers()


def test_refused_access_to_a_google_bucket_is_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ("--option", "token=anon", "--option", f"endpoint_url=http://127.0.0.1:{server.server_port}")
        assert "Forbidden" in error_of("ls", "gs://bucket/prefix", *options)
        server.shutdown()


def test_place_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    for command in COMMANDS:
        error = error_at(tmp_path / "nothing", command)
        assert error.startswith("Error: There is no")
        assert "nothing" in error


def test_other_directories_are_no_checkpoints(place: Location) -> None:
    for number in range(20):
        (place / f"11111111-2222-3333-4444-{number:012}/tensorboard/events").write(b"")
    deeper, checkpoint_id = (CheckpointStorage(f"{place}{below}").write(make_files()) for below in ("/zuletzt", ""))
    (place / "note.txt").write(b"")
    for command in ("ls", "verify"):
        said = run(command, place).stdout
        assert checkpoint_id in said
        assert deeper not in said


# newest()


def test_missing_storage_is_warned_of_and_empty_one_is_not(
    place: Location, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert CheckpointStorage(tmp_path / "ckeckpoints").newest() is None
    (place / "notes.txt").write(b"an existing directory")
    assert CheckpointStorage(place.url).newest() is None  # the first start of a run, which is no reason to warn
    (missing,) = caplog.records
    assert missing.levelno == logging.WARNING
    assert f"{tmp_path / 'ckeckpoints'} does not exist" in missing.getMessage()


def test_bare_id_is_looked_for_in_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = write_checkpoint(Path("experiments", "mnist-1", "checkpoints"))
    assert checkpoint.name in run("show", checkpoint.name).output
    second = write_checkpoint(Path("experiments", "mnist-2", "checkpoints"))
    second.rename(second.with_name(checkpoint.name))
    assert "There are 2 checkpoints" in error_of("show", checkpoint.name)
