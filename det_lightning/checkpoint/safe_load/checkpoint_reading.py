"""``CheckpointReading``: what to trust in a checkpoint, how to reach it, and what to read if it is damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from det_lightning.arguments import refuse_texts


@dataclasses.dataclass(frozen=True)
class CheckpointReading:
    """How a run reads the checkpoint that it resumes from.

    Attributes:
        trusted: unpickle any object in a checkpoint, running any code in the file.
        storage_options: for the file system of a URL, for example ``endpoint_url``; see ``CheckpointStorage``.
        newest_first: paths or URLs of checkpoints, from ``CheckpointStorage.newest_first()``. In place of a damaged
            checkpoint among these, the next is read, with a warning.
        recorded: SHA-256 of files to trust, recorded when the files were written.

    Raises:
        TypeError: ``trusted`` is a text.

    Example:
        >>> from det_lightning.adapters import TrialModule
        >>> from det_lightning.checkpoint import CheckpointReading, CheckpointStorage
        >>> from model_def import MyTrial
        >>> newest = [*CheckpointStorage("checkpoints").newest_first()]
        >>> module = TrialModule(MyTrial, hparams={"lr": 0.01}, reading=CheckpointReading(newest_first=newest))

        Pass ``ckpt_path=newest[0]`` to ``pl.Trainer.fit``.
    """

    trusted: bool = False
    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    newest_first: Sequence[str] = ()
    recorded: Collection[str] = ()

    def __post_init__(self) -> None:
        refuse_texts("CheckpointReading()", trusted=self.trusted)
