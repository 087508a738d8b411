"""``DeterminedCheckpoint``: where and how often a run saves; ``det_lightning/engine/checkpointing.py`` does it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import require_trial_module
from det_lightning.arguments import wrong_argument
from det_lightning.checkpoint.format.code_copy import CodeCopier, require_code_directory
from det_lightning.checkpoint.retention.policy import Retention, complete_policy, find_differences
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.engine.checkpointing import RunCheckpoints, Saving
from det_lightning.escaping import escape, get_logger
from det_lightning.masking import mask_url
from det_lightning.units import TrainUnit

logger = get_logger(__name__)


class DeterminedCheckpoint(pl.Callback):
    """Writes checkpoints for Determined 0.38 and det_lightning: by ``period``, by ``policy``, and at the end of a run.

    Args:
        storage: a directory or URL for one directory per checkpoint, the ``checkpoint_storage`` section of an
            experiment configuration, or a ``CheckpointStorage``. Defaults to the storage of the configuration in
            ``fit(checkpoints=...)``, else to Determined's own storage for local runs; so does a section that only says
            which checkpoints to keep.
        policy: the validations to save after: ``"all"``, ``"best"`` (improvements of ``metric``) or ``"none"``.
            Defaults to the policy of ``Trainer.fit``, else ``"best"``. Without a metric, ``"best"`` means ``"all"``.
        period: the interval of further checkpoints, such as ``Batch(1000)``. Defaults to the period of ``Trainer.fit``.
        metric: name of the validation metric for ``"best"`` and ``retention``. Defaults to the searcher's in the
            configuration of the trial.
        smaller_is_better: whether a smaller value of ``metric`` is an improvement. Defaults to the searcher's rule for
            the same metric, else True.
        code_dir: the directory to copy into each checkpoint. Defaults to the working directory.
        code_with_secrets: also copy files with names that suggest secrets, such as ``.env``.
        async_write: copy the state, and write the copy while training continues. Defaults to True for remote storage.
            An error of the writer is raised at the next boundary.
        retention: the checkpoints to keep. Defaults to the configuration given as ``storage``, else to all.
        experiment: name of the experiment; retention compares the trials of an experiment. Defaults to the trial alone.
        trial: name of the trial, which only one run at a time may use. Defaults, in a run that resumes, to the name in
            the checkpoint, unless another run with this name is alive.
        fall_back: if the newest checkpoint is damaged, let ``fit(latest_checkpoint="last")`` resume from an older
            checkpoint, with a warning; False raises an error. A checkpoint given by name is never replaced.
        best_elsewhere: called on the chief at each validation; returns the best value of ``metric`` outside the run,
            for example in other trials of the experiment, or None. ``"best"`` then also beats this value.
        on_complete: called on the chief for each complete checkpoint, with the id and the number of batches.
        job: name of the job, with which ``storage.newest(job=...)`` finds the checkpoints.

    Attributes:
        storage: the ``CheckpointStorage`` of the run.
        policy: when to write checkpoints, and which checkpoints to keep.
        fall_back: as given.

    Raises:
        ValueError: the policy is unknown.
        StorageError: the storage cannot be opened.

    Example:
        >>> from det_lightning.callbacks import DeterminedCheckpoint
        >>> checkpoints = DeterminedCheckpoint("checkpoints", policy="best", metric="validation_loss")

        Pass it in ``pl.Trainer(callbacks=[checkpoints])``.
    """

    def __init__(
        self,
        storage: str | os.PathLike[str] | Mapping[str, Any] | CheckpointStorage | None = None,
        *,
        policy: str | None = None,
        period: TrainUnit | None = None,
        metric: str | None = None,
        smaller_is_better: bool | None = None,
        code_dir: str | os.PathLike[str] | None = None,
        code_with_secrets: bool = False,
        async_write: bool | None = None,
        retention: Retention | None = None,
        experiment: str | None = None,
        trial: str | None = None,
        job: str | None = None,
        fall_back: bool = True,
        best_elsewhere: Callable[[], float | None] | None = None,
        on_complete: Callable[[str, int], None] | None = None,
    ) -> None:
        own = {"policy": policy, "period": period, "metric": metric, "smaller_is_better": smaller_is_better}
        flags = {"code_with_secrets": code_with_secrets, "async_write": async_write, "fall_back": fall_back}
        _refuse_wrong_kinds({**own, **flags, "retention": retention, "code_dir": code_dir})
        self.fall_back = fall_back
        place, in_section = _split_section(storage)
        self._own_storage = None if place is None else _open_storage(place)
        self._own_policy = {**own, "retention": retention or in_section}
        self.policy, _ = complete_policy(self._own_policy, {}, {})
        self._async_write = async_write
        self._code = code_dir, code_with_secrets
        self._given = Saving(
            experiment=experiment,
            trial=trial,
            job=job,
            best_elsewhere=best_elsewhere,
            on_complete=on_complete,
        )
        self.fill_in()

    def fill_in(
        self,
        storage: Any = None,
        policy: str | None = None,
        period: TrainUnit | None = None,
        **names: Any,
    ) -> None:
        """Prepare for another run: the arguments fill in what the callback leaves open."""
        missing = {name: value for name, value in names.items() if getattr(self._given, name) is None}
        place, in_section = _split_section(storage) if self._own_storage is None else (self._own_storage, None)
        self._place = place
        self._configured_policy = {"policy": policy, "period": period, "retention": in_section}
        self._saving = dataclasses.replace(self._given, **missing)
        self.job = self._saving.job
        for opened in ("storage", "_checkpoints"):
            self.__dict__.pop(opened, None)

    @functools.cached_property
    def storage(self) -> CheckpointStorage:
        """The storage of the run, opened at the first access."""
        return _open_storage(self._place)

    @functools.cached_property
    def _checkpoints(self) -> RunCheckpoints:
        in_background = not self.storage.is_local if self._async_write is None else self._async_write
        saving = dataclasses.replace(self._saving, code=CodeCopier(*self._code), in_background=in_background)
        return RunCheckpoints(self.storage, self.policy, saving)

    def require_agreement(self, checkpoint_storage: object, checkpoint_policy: Any, checkpoint_period: Any) -> None:
        """Raise a ValueError for arguments of ``fit`` that contradict this callback; None never contradicts."""
        said = {"policy": checkpoint_policy, "period": checkpoint_period}
        wrong = [
            f"checkpoint_{name}={other!r}, but the callback has {name}={value!r}"
            for name, value, other in find_differences(self._own_policy, said)
        ]
        if checkpoint_storage is not None:
            wrong.append(f"checkpoint_storage=..., but the callback writes to {escape(self.storage)}")
        if wrong:
            raise ValueError(
                f"fit(checkpoints=DeterminedCheckpoint(...)) also got {'; and '.join(wrong)}. Pass the option once, to "
                "the callback."
            )

    @property
    def last_checkpoint_id(self) -> str | None:
        """The id of the checkpoint begun last; None before the first checkpoint."""
        return self._checkpoints.last_id

    @property
    def last_checkpoint_path(self) -> str | None:
        """The path or URL of the checkpoint begun last; a URL includes the password that the storage was given."""
        return self._make_path(self._checkpoints.last_id)

    @property
    def best_checkpoint_path(self) -> str | None:
        """The path or URL of the best validation's checkpoint; None before the first, or under another policy."""
        return self._make_path(self._checkpoints.best_id)

    @property
    def best_value(self) -> float | None:
        """The best value of ``metric`` so far."""
        return self._checkpoints.best_value

    def describe_saved(self, resumed_from: str | None = None) -> str:
        """Return one sentence that says what an interrupted run saved and how to continue."""
        if self._checkpoints.complete is not None:
            checkpoint_id, batches = self._checkpoints.complete
            return (
                f"Checkpoint {checkpoint_id} in {self.storage} has the first {batches} batches. To continue: "
                f"fit(latest_checkpoint={checkpoint_id!r})."
            )
        if resumed_from is not None:
            shown = mask_url(resumed_from)
            return f"Nothing was saved since {shown}. To continue from there: fit(latest_checkpoint={shown!r})."
        return "Nothing was saved; PreemptionHandler(save_on_interrupt=True) saves on Ctrl-C."

    def _make_path(self, checkpoint_id: str | None) -> str | None:
        return None if checkpoint_id is None else (self.storage.root / checkpoint_id).url

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Complete the policy, and connect the module with the writer of checkpoints.

        Raises:
            TypeError: the module is not a ``TrialModule``.
        """
        module = require_trial_module(self, pl_module)
        module.checkpoints = self._checkpoints
        if stage == "fit":
            assert module.context is not None  # the first of all callbacks has built the trial
            searcher = module.context.settings.section("searcher")
            self.policy, warnings = complete_policy(self._own_policy, self._configured_policy, searcher)
            self._checkpoints.policy = self.policy
            if trainer.is_global_zero:
                for warning in warnings:
                    logger.warning(warning)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Lock the trial, begin to remove leftovers of killed runs, and log the storage.

        Raises:
            StorageError: the storage cannot be written to, or a live run has the name of the trial.
        """
        if trainer.is_global_zero:
            if self._place is None:  # a warning, because warnings are shown even if logging is not configured
                logger.warning("No storage of checkpoints is set: checkpoints go to %s.", self.storage)
            else:
                logger.info("Checkpoints go to %s.", self.storage)
        self._checkpoints.begin(pl_module.resume_content, leads=trainer.is_global_zero)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Release the trial if the fit ended before training began."""
        if getattr(pl_module, "driver", None) is None:
            self.close()

    def close(self) -> None:
        """Release the trial."""
        self._checkpoints.close()


def _split_section(storage: Any) -> tuple[Any, Retention | None]:
    """Return the storage that an argument names, if any, and the retention in a section of the configuration."""
    if not isinstance(storage, Mapping):
        return storage, None
    names_place = any(value is not None and not name.startswith("save_") for name, value in storage.items())
    return storage if names_place else None, Retention.from_config(storage)


def _open_storage(place: Any) -> CheckpointStorage:
    return place if isinstance(place, CheckpointStorage) else CheckpointStorage(place)


def _refuse_wrong_kinds(given: Mapping[str, Any]) -> None:
    """Raise a TypeError that names each argument of the wrong kind; None is always accepted."""
    flag = (int, "True or False")
    kinds: dict[str, tuple[Any, str]] = {
        "retention": (Retention, "a Retention, such as Retention(trial_latest=3)"),
        "code_dir": ((str, os.PathLike), "the path of a directory"),
        "period": (TrainUnit, "a Batch or an Epoch, such as Epoch(5)"),
        "metric": (str, "the name of a metric"),
        **dict.fromkeys(("smaller_is_better", "code_with_secrets", "async_write", "fall_back"), flag),
    }
    mistakes = [
        wrong_argument(f"DeterminedCheckpoint({name}=...)", expected, given[name])
        for name, (kind, expected) in kinds.items()
        if given[name] is not None and not isinstance(given[name], kind)
    ]
    if mistakes:
        raise TypeError(" ".join(mistakes))
    require_code_directory("DeterminedCheckpoint", given["code_dir"])
