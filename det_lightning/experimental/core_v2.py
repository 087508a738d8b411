"""The Core API without a ``with`` block: attributes of this module, None except between ``init`` and ``close``."""

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
from det_lightning.core import DistributedContext, PreemptMode, TensorboardMode
from det_lightning.core._cluster import describe_task
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

# __getattr__ finds these in the open context.
checkpoint: Any
distributed: Any
info: Any
preempt: Any
searcher: Any
train: Any
_opened: core.Context | None = None


@dataclasses.dataclass
class Config:
    """The settings of a script that runs alone; in a trial of ``det-lightning run`` the experiment's count.

    Args:
        name, description, labels, workspace, project: kept in ``info.trial``, without effect.
        hparams: the hyperparameters, ``info.trial.hparams``.
        data: the user's data, ``info.user_data``.
        checkpoint_storage: a directory, a URL, or the section of an experiment configuration.
        searcher: the section of an experiment configuration; without effect.
        external_experiment_id: a name of the experiment.
        external_trial_id: a name of the trial in the experiment. A restarted script with both names continues from
            ``info.latest_checkpoint``, the newest checkpoint in the storage under these names.

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


DefaultConfig = UnmanagedConfig = Config  # the older names, for ``defaults`` and ``unmanaged``


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
    """Return the Core API for a ``with`` block, as :func:`det_lightning.core.init` does.

    Args:
        config: the settings of the script; ignored in a trial of ``det-lightning run``.
        defaults, unmanaged: older forms of ``config``.
        client: accepted for compatibility; there is no master to talk to.
        distributed, checkpoint_storage, preempt_mode, tensorboard_mode: as in :func:`det_lightning.core.init`.

    Raises:
        ValueError: the script runs alone, with neither ``config`` nor ``defaults``, or with an ``external_trial_id``
            but no ``external_experiment_id``; or as in :func:`det_lightning.core.init`.
        StorageError: the storage cannot be opened.

    Example:
        >>> from det_lightning.experimental import core_v2
        >>> config = core_v2.Config(hparams={"scale": 0.5}, checkpoint_storage="checkpoints")
        >>> with core_v2.init_context(config=config) as context:
        ...     context.info.trial.hparams["scale"]
        0.5
    """
    settings = _merge(config, defaults, unmanaged)
    is_alone = core.get_cluster_info() is None
    if is_alone and settings is None:
        raise ValueError("Outside of det-lightning run, core_v2 needs config=core_v2.Config(...); got none.")
    if is_alone and settings is not None:
        if settings.external_trial_id is not None and settings.external_experiment_id is None:
            raise ValueError(
                f"core_v2.Config(external_trial_id={settings.external_trial_id!r}) names a trial of no experiment; "
                "pass external_experiment_id= too."
            )
        checkpoint_storage = checkpoint_storage or settings.checkpoint_storage
    context = core.init(
        distributed=distributed,
        checkpoint_storage=checkpoint_storage,
        preempt_mode=preempt_mode,
        tensorboard_mode=tensorboard_mode,
    )
    if context.info is None and settings is not None:
        context.info = describe_task(_make_task(context, settings))
    return context


def init(**arguments: Any) -> None:
    """Open the Core API for this module, until :func:`close` or the end of the process; an open one is closed first.

    The arguments and errors are the same as for :func:`init_context`.

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
    """Close the Core API that :func:`init` opened; calling it again changes nothing.

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
    """Return the directory of the TensorBoard files, a substitute for the experiment's page.

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
        raise RuntimeError("Call core_v2.init() before url_reverse_webui_exp_view().")
    return str(_opened.train.get_tensorboard_path())


def _merge(config: Config | None, defaults: Config | None, unmanaged: Config | None) -> Config | None:
    if defaults is not None or unmanaged is not None:
        warnings.warn("defaults= and unmanaged= are deprecated; use config= instead.", FutureWarning, stacklevel=3)
    if config is not None or defaults is None or unmanaged is None:
        return config or defaults
    names = ("project", "workspace", "external_experiment_id", "external_trial_id")
    return dataclasses.replace(
        defaults, **{name: getattr(defaults, name) or getattr(unmanaged, name) for name in names}
    )


def _make_task(context: core.Context, config: Config) -> TrialTask:
    """Return the trial of a script that runs alone, with the newest checkpoint under the trial's names."""
    latest = None
    steps = None
    if config.external_trial_id is not None:
        job = json.dumps([config.external_experiment_id, config.external_trial_id])
        latest = context.checkpoint.continue_job(job)
    if latest is not None:
        if context.distributed.rank == 0:
            logger.info("The trial resumes from checkpoint %s in %s.", latest, context.checkpoint.storage)
            steps = context.checkpoint.get_metadata(latest).get("steps_completed")
        steps = context.distributed.broadcast(steps)
    settings = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return TrialTask(
        directory=Path(),
        experiment_id=1,
        trial_id=1,
        run_id=1,
        trial_seed=0,
        hparams=settings.get("hparams", {}),
        config=settings,
        slots=[],
        checkpoint_storage="",
        latest_checkpoint=latest,
        steps_completed=steps if isinstance(steps, int) else 0,
    )


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "distributed", "info", "preempt", "searcher", "train"):
        return None if _opened is None else getattr(_opened, name)
    raise attribute_error(__name__, name)
