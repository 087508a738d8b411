"""``init()`` for scripts that train an Estimator without a trial class, at the path of Determined up to 0.14.6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from det_lightning.core._task import current_task
from det_lightning.missing_parts import attribute_error

if TYPE_CHECKING:
    from det_lightning.estimator import EstimatorNativeContext

__all__ = ["init"]


def init(
    config: dict[str, Any] | None = None,
    local: bool = False,
    test: bool = False,
    context_dir: str = "",
    command: Sequence[str] | None = None,
    master_url: str | None = None,
) -> EstimatorNativeContext:
    """Return the context of a script; ``train_and_evaluate(estimator, train_spec, eval_spec)`` trains.

    Args:
        config: experiment configuration, with the length of the training, unless ``test``.
        local: train in this process. Always so under ``det-lightning run``, with the configuration of the experiment.
        test: train on a batch, validate on a batch, save, and end.
        context_dir: becomes the working directory, unless empty.
        command, master_url: for a cluster; not used.

    Raises:
        ValueError: ``local`` is False outside of an experiment: there is no cluster to submit to.
        ConfigError: Determined's master would refuse ``config``; all mistakes are named.
        ModuleNotFoundError: TensorFlow is not installed; the message has the command.
    """
    if not local and current_task() is None:
        raise ValueError(
            f"estimator.init(local={local!r}) submits the script to a Determined master, and det_lightning has none. "
            "Pass local=True to train in this process, or start the script as the entrypoint of a configuration: "
            "det-lightning run CONFIG."
        )
    from det_lightning.estimator import EstimatorNativeContext

    return EstimatorNativeContext.of_call(config, test, context_dir)


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
