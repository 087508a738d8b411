"""Whether ranks share one copy of a checkpoint."""

from __future__ import annotations

import enum


class DownloadMode(enum.Enum):
    """Whether the ranks of a machine share one copy of a checkpoint, which all must ask for, or each gets its own.

    Example:
        >>> import pathlib
        >>> import det_lightning as det
        >>> with det.core.init(checkpoint_storage="checkpoints") as core_context:
        ...     with core_context.checkpoint.store_path({"steps_completed": 1}) as (path, storage_id):
        ...         _ = (path / "state.txt").write_text("0.5")
        ...     own_copy = f"copy_of_rank_{core_context.distributed.rank}"
        ...     core_context.checkpoint.download(storage_id, own_copy, det.core.DownloadMode.NoSharedDownload)
        >>> pathlib.Path("copy_of_rank_0", "state.txt").read_text()
        '0.5'
    """

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    NoSharedDownload = "NO_SHARED_DOWNLOAD"
