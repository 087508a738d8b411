"""SHA-256 of files: unlike the checksums in a manifest, nobody can make another file that has the same."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator

_CHUNK_BYTES = 1024 * 1024


def digest_file(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    for chunk in _read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def copy_and_digest(path: pathlib.Path, copy: pathlib.Path) -> str:
    """Copy a file and return the SHA-256 of what was copied, whatever becomes of the file meanwhile."""
    digest = hashlib.sha256()
    with copy.open("xb") as file:
        for chunk in _read_chunks(path):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _read_chunks(path: pathlib.Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
