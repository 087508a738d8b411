"""Concurrent requests to object stores, which take some milliseconds to answer each."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from det_lightning.checkpoint.storage.location import Location

_AT_ONCE = 16


def in_parallel(root: Location, function: Callable[[Any], Any], arguments: list[Any]) -> list[Any]:
    """Call a function that reads from ``root`` with each of ``arguments``; return the results in order."""
    # A connection such as SFTP's must not be used by two threads at once.
    if not root.is_object_store or len(arguments) < 2:
        return [function(argument) for argument in arguments]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, arguments))
