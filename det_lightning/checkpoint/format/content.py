"""The content of a checkpoint in memory, the progress of a trial, and how a run reads checkpoints. Needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_lightning.arguments import refuse_texts

if TYPE_CHECKING:
    import torch

    from det_lightning.checkpoint.format.resume_state import ResumeState


@dataclasses.dataclass
class TrialState:
    """The progress of a trial; the content of ``trial_state.pkl``.

    Attributes:
        trial_id: Determined's id of the trial, 0 for a local run.
        last_ckpt: ``batches_trained`` at the latest checkpoint; counts may be at most 2,147,483,647.
        step_id: kept for Determined; not used.
        last_val: ``batches_trained`` at the latest validation.
        batches_trained: number of batches trained on.
        epochs_trained: number of epochs completed.

    Example:
        >>> from det_lightning.checkpoint import TrialState
        >>> state = TrialState(batches_trained=100, epochs_trained=2, last_val=50)
        >>> state.batches_trained - state.last_val  # batches since the latest validation
        50
    """

    trial_id: int = 0
    last_ckpt: int = 0
    step_id: int = 0
    last_val: int = 0
    batches_trained: int = 0
    epochs_trained: int = 0


@dataclasses.dataclass
class CheckpointContent:
    """The content of a checkpoint to write, read, convert or resume from.

    Attributes:
        state: models, optimizers, schedulers, callbacks and random state, as in ``state_dict.pth``. The keys are those
            of the writing release; see ``modernize``.
        trial_state: the progress of the trial; ``trial_state.pkl``.
        load_data: how to build the trial again; ``load_data.json``. None if unknown.
        resume: the state for an exact resume, beyond Determined's format; ``resume.pth``. None if Determined wrote the
            checkpoint.
        lightning: Lightning's own state; ``lightning.pth``. None if there is none.
        notes: entries of ``metadata.json`` beyond Determined's, for a checkpoint to be written.
        epochs_known: ``trial_state`` has the number of epochs; old releases did not write the number.
        has_weights: ``state`` holds models and optimizers; Lightning's own files keep both elsewhere.
        name: the checkpoint's id; empty before the first write.
        time_s: when the checkpoint was written, in seconds since 1970, by its metadata; None if unknown.
        source: path or URL of the file with the state, for messages.
        directory: the directory from which the content was read; None if there was none.
        is_sharded: ``state`` and ``resume`` lack the values of tensors that are stored in parts.
        shards: for a checkpoint to be written, the sharded tensors by name; every rank writes a part.
        described: size and checksum of the files that several ranks wrote, as in the manifest.
        kept: keeps a downloaded ``directory`` until all files have been read.
        copies: tensors of ``state`` that nothing else uses; a write in the background need not copy these.
        files: a directory whose content moves into the checkpoint; None if there is none.

    Example:
        >>> from det_lightning.checkpoint import CheckpointContent, TrialState
        >>> content = CheckpointContent(
        ...     state={"models_state_dict": []},
        ...     trial_state=TrialState(batches_trained=100),
        ...     load_data={"trial_cls_spec": "model_def:MyTrial"},
        ... )
        >>> content.trial_class, content.for_new_trial().trial_state.batches_trained
        ('model_def:MyTrial', 0)
    """

    state: dict[str, Any]
    trial_state: TrialState
    load_data: dict[str, Any] | None = None
    resume: ResumeState | None = None
    lightning: dict[str, Any] | None = None
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    epochs_known: bool = True
    has_weights: bool = True
    name: str = ""
    time_s: float | None = None
    source: str = ""
    directory: pathlib.Path | None = None
    is_sharded: bool = False
    shards: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    described: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    kept: contextlib.ExitStack | None = None
    copies: Sequence[torch.Tensor] = ()
    files: pathlib.Path | None = None

    @property
    def trial_class(self) -> str | None:
        """The class of the trial, as ``"module:QualName"``; None if unknown."""
        found = (self.load_data or {}).get("trial_cls_spec")
        return found if isinstance(found, str) else None

    def for_new_trial(self) -> CheckpointContent:
        """Return the content for another trial to start from: the same state, with all counts at 0."""
        return dataclasses.replace(self, trial_state=TrialState(), resume=None, epochs_known=True)


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
    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    newest_first: Sequence[str] = ()
    recorded: Collection[str] = ()

    def __post_init__(self) -> None:
        refuse_texts("CheckpointReading()", trusted=self.trusted)
