"""The Core API without a ``with`` block: the parts are attributes of this module between ``init`` and ``close``.

``train``, ``checkpoint``, ``distributed``, ``preempt``, ``searcher`` and ``info`` belong to the context opened by
:func:`init`, and are None without an open context.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_lightning import core
from det_lightning.core import ClusterInfo, DistributedContext, PreemptMode, TensorboardMode
from det_lightning.core._cluster import info_of
from det_lightning.core._task import TrialTask
from det_lightning.missing_parts import attribute_error

__all__ = [
    "Config",
    "DefaultConfig",
    "DistributedContext",
    "PreemptMode",
    "TensorboardMode",
    "UnmanagedConfig",
    "checkpoint",
    "close",
    "distributed",
    "info",
    "init",
    "init_context",
    "preempt",
    "searcher",
    "train",
    "url_reverse_webui_exp_view",
]

logger = logging.getLogger(__name__)

# Found by __getattr__ in the open context.
checkpoint: Any
distributed: Any
info: Any
preempt: Any
searcher: Any
train: Any
_PARTS = ("checkpoint", "distributed", "info", "preempt", "searcher", "train")
# The open context of init().
_opened: core.Context | None = None


@dataclasses.dataclass
class Config:
    """The configuration of a script that runs alone; ignored in a trial of ``det-lightning run``.

    Args:
        name, description, labels, workspace, project: of the experiment; kept in ``info.trial``, without effect.
        hparams: the value of ``info.trial.hparams``.
        data: the value of ``info.user_data``.
        checkpoint_storage: a directory, a URL, or the section of an experiment configuration.
        searcher: the section of an experiment configuration; without effect.
        external_experiment_id: a name of the experiment.
        external_trial_id: a name of the trial in the experiment. A script started again with both names continues
            from the newest checkpoint saved under the names in the same storage: ``info.latest_checkpoint``.

    Example:
        >>> from det_lightning.experimental import core_v2
        >>> config = core_v2.Config(name="noise", hparams={"scale": 0.5}, checkpoint_storage="checkpoints")
        >>> config.hparams
        {'scale': 0.5}
    """

    name: str | None = None
    hparams: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    description: str | None = None
    labels: list[str] | None = None
    workspace: str | None = None
    project: str | None = None
    checkpoint_storage: str | dict[str, Any] | None = None
    searcher: dict[str, Any] | None = None
    external_experiment_id: str | None = None
    external_trial_id: str | None = None


# The older names, for ``defaults`` and ``unmanaged``.
DefaultConfig = UnmanagedConfig = Config


def init_context(
    *,
    config: Config | None = None,
    defaults: Config | None = None,
    unmanaged: Config | None = None,
    client: Any = None,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> core.Context:
    """Return the Core API for a ``with`` block, like :func:`det_lightning.core.init`.

    Args:
        config: the configuration of the script; ignored in a trial of ``det-lightning run``.
        defaults, unmanaged: older forms of ``config``.
        client: accepted for compatibility; there is no master to talk to.
        distributed, checkpoint_storage, preempt_mode, tensorboard_mode: as in :func:`det_lightning.core.init`.

    Raises:
        ValueError: the script runs alone, and there is neither ``config`` nor ``defaults``, or an
            ``external_trial_id`` without an ``external_experiment_id``; or as in :func:`det_lightning.core.init`.
        TypeError: an external id is not a string.
        StorageError: the storage cannot be opened.

    Example:
        >>> from det_lightning.experimental import core_v2
        >>> config = core_v2.Config(hparams={"scale": 0.5}, checkpoint_storage="checkpoints")
        >>> with core_v2.init_context(config=config) as context:
        ...     context.info.trial.hparams["scale"]
        0.5
    """
    known = _merge_configs(config, defaults, unmanaged)
    job = None
    if core.get_cluster_info() is None:
        if known is None:
            raise ValueError("Outside of det-lightning run, core_v2 needs config=core_v2.Config(...); got none.")
        job = _name_job(known)
        checkpoint_storage = checkpoint_storage or known.checkpoint_storage
    context = core.init(
        distributed=distributed,
        checkpoint_storage=checkpoint_storage,
        preempt_mode=preempt_mode,
        tensorboard_mode=tensorboard_mode,
    )
    if context.info is None and known is not None:
        context.info = _make_info(known, *_find_latest(context, job))
    return context


def init(**arguments: Any) -> None:
    """Open the Core API for this module, until the next ``init``, :func:`close`, or the end of the process.

    For arguments and errors, see :func:`init_context`.

    Example:
        >>> from det_lightning.experimental import core_v2
        >>> core_v2.init(config=core_v2.Config(hparams={"scale": 0.5}, checkpoint_storage="checkpoints"))
        >>> core_v2.info.trial.hparams["scale"]
        0.5
        >>> core_v2.close()
    """
    global _opened
    close()
    context = init_context(**arguments)
    context.start()
    _opened = context
    atexit.unregister(close)
    atexit.register(close)


def close() -> None:
    """Close the context opened by :func:`init`; a second call changes nothing.

    Example:
        >>> from det_lightning.experimental import core_v2
        >>> core_v2.init(config=core_v2.Config(checkpoint_storage="checkpoints"))
        >>> core_v2.close()
        >>> core_v2.train is None
        True
    """
    global _opened
    context = _opened
    _opened = None
    if context is not None:
        context.close()


def url_reverse_webui_exp_view() -> str:
    """Return the directory of the TensorBoard files, in place of the page of the experiment.

    Raises:
        RuntimeError: :func:`init` was not called.

    Example:
        >>> from det_lightning.experimental import core_v2
        >>> core_v2.init(config=core_v2.Config(checkpoint_storage="checkpoints"))
        >>> core_v2.url_reverse_webui_exp_view() == str(core_v2.train.get_tensorboard_path())
        True
        >>> core_v2.close()
    """
    if _opened is None:
        raise RuntimeError("core_v2.init() comes before url_reverse_webui_exp_view().")
    return str(_opened.train.get_tensorboard_path())


def _merge_configs(config: Config | None, defaults: Config | None, unmanaged: Config | None) -> Config | None:
    if defaults is not None or unmanaged is not None:
        warnings.warn("defaults= and unmanaged= are older forms of config=.", FutureWarning, stacklevel=3)
    if config is not None or defaults is None or unmanaged is None:
        return config or defaults
    names = ("project", "workspace", "external_experiment_id", "external_trial_id")
    return dataclasses.replace(
        defaults, **{name: getattr(defaults, name) or getattr(unmanaged, name) for name in names}
    )


def _name_job(config: Config) -> str | None:
    """Return the key that identifies this trial's checkpoints, or None if the trial cannot be resumed."""
    experiment = config.external_experiment_id
    trial = config.external_trial_id
    for field, name in (("external_experiment_id", experiment), ("external_trial_id", trial)):
        if not isinstance(name, str | None):
            raise TypeError(
                f"core_v2.Config({field}=...) must be a string; got {name!r} of type {type(name).__name__}."
            )
    if trial is not None and experiment is None:
        raise ValueError(
            f"core_v2.Config(external_trial_id={trial!r}) names a trial of no experiment; give external_experiment_id= "
            "too."
        )
    return None if trial is None else json.dumps([experiment, trial])


def _find_latest(context: core.Context, job: str | None) -> tuple[str | None, int]:
    """Return the newest checkpoint of a job and the number of trained batches; None and 0 without a checkpoint."""
    latest = None if job is None else context.checkpoint.continue_job(job)
    if latest is None:
        return None, 0
    steps = None
    if context.distributed.rank == 0:
        logger.info("The trial goes on from checkpoint %s in %s.", latest, context.checkpoint.storage)
        steps = context.checkpoint.get_metadata(latest).get("steps_completed")
    steps = context.distributed.broadcast(steps)
    return latest, steps if isinstance(steps, int) else 0


def _make_info(config: Config, latest_checkpoint: str | None, steps_completed: int) -> ClusterInfo:
    known = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    task = TrialTask(
        directory=Path(),
        experiment_id=1,
        trial_id=1,
        run_id=1,
        trial_seed=0,
        hparams=known.get("hparams", {}),
        config=known,
        slots=[],
        checkpoint_storage="",
        latest_checkpoint=latest_checkpoint,
        steps_completed=steps_completed,
    )
    return info_of(task)


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return None if _opened is None else getattr(_opened, name)
    raise attribute_error(__name__, name)
