"""Looking through the pickles in a file of ``torch.save`` before torch reads them.

``torch.load(weights_only=True)`` runs no foreign code, but it believes what it is told: ``bytearray`` of ten billion, a
sparse tensor whose indices lead out of it, keys that take years to hash. What is here follows the same pickle with
descriptions in place of values, and lets only pass what ``torch.save`` writes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import IO

import torch

from det_lightning.checkpoint.safe_load.allowed_calls import CALLS, NAMES
from det_lightning.checkpoint.safe_load.descriptions import require_bounded
from det_lightning.checkpoint.safe_load.numpy_values import STAND_INS
from det_lightning.checkpoint.safe_load.pickle_interpreter import PickleScreen

__all__ = ["screen_archived", "screen_old_format"]

# What torch.save wrote before 1.6 begins with these two pickles.
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_PROTOCOL = 1001


def screen_archived(pickled: bytes, storage_sizes: Mapping[str, int]) -> None:
    """Raise unless ``torch.save`` can have written a pickle, or it is read in no time and little memory anyway.

    Args:
        pickled: content of ``data.pkl`` of an archive.
        storage_sizes: bytes of each storage in the archive, by its key.

    Raises:
        pickle.UnpicklingError: it refers to something that is not known to be safe.
        ValueError, and others: it is damaged, or made up.
    """

    def claim(key: str, nbytes: int) -> bool:
        return storage_sizes.get(key) == nbytes

    screen = PickleScreen(io.BytesIO(pickled), len(pickled), claim, _allowed_names(), CALLS, NAMES)
    require_bounded(screen.run())


def _allowed_names() -> frozenset[str]:
    declared = torch.serialization.get_safe_globals()
    names = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in declared}
    # torch declares its nested tensors safe, but checks nothing of what they are made of.
    safe = {name for name in names if not name.startswith(("torch.nested.", "torch._dynamo."))}
    return frozenset(STAND_INS | safe) - frozenset(CALLS)


def screen_old_format(file: IO[bytes], size: int) -> None:
    """Do the same for a file that ``torch.save`` wrote before 1.6.

    Args:
        file: at its beginning.
        size: of the file in bytes.

    Raises:
        pickle.UnpicklingError, ValueError, and others: see :func:`screen_archived`.
    """
    claimed: set[str] = set()
    left = size

    def claim(key: str, nbytes: int) -> bool:
        nonlocal left
        claimed.add(key)
        left -= nbytes + 8  # before each there is its length
        return left >= 0

    if PickleScreen(file, size).run() != _OLD_MAGIC or PickleScreen(file, size).run() != _OLD_PROTOCOL:
        raise ValueError("it does not begin as torch.save lets it")
    PickleScreen(file, size).run()  # of the machine that wrote it
    require_bounded(PickleScreen(file, size, claim, _allowed_names(), CALLS, NAMES).run())
    keys = PickleScreen(file, size).run()
    if type(keys) is not list or sorted(map(str, keys)) != sorted(claimed):
        raise ValueError("the tensors and their content do not belong together")
