"""Which rank failed first, so that torchrun reports that one."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from det_lightning import errors
from det_lightning.core._store import Store

# torchrun takes the first failure that it sees for the cause of the others. It looks ten times a second, and a process
# needs some time to end.
_HEAD_START_S = 3.0
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Part of gloo's message if the process at the other end of a connection has ended.
_OF_LOST_CONNECTIONS = "gloo/transport/"


def is_failure(error: BaseException) -> bool:
    """Return whether a process that ends with this error has failed, rather than been asked to end."""
    return isinstance(error, Exception) and not isinstance(error, errors.InvalidHP | errors.ShouldExit)


def claim_first_failure(store: Store | None, rank: int, error: BaseException) -> bool:
    """Write the error into the file that torchrun reads, if this rank is the first of its run to fail.

    Return False if another rank was or may have been the first: ``store`` is None if this rank left the session because
    an exchange failed, and a lost connection means that another process has ended.
    """
    if store is None or isinstance(error, dist.DistError) or _OF_LOST_CONNECTIONS in str(error):
        return False
    own = str(rank).encode()
    try:
        if store.compare_set("failed", "", own) != own:
            return False
    except RuntimeError:  # the store is lost, together with the process that ran it
        return False
    _record(error)
    return True


def follow_first_failure(error: BaseException) -> None:
    """Give the rank that failed first some time to end before this one, then write the error file."""
    if reports_failures():
        time.sleep(_HEAD_START_S)
        _record(error)


def reports_failures() -> bool:
    """Return whether torchrun started this process and reads what it writes about its failure."""
    return bool(os.environ.get(_ERROR_FILE))


def _record(error: BaseException) -> None:
    if reports_failures():
        get_error_handler().record_exception(error)
