"""``test_one_batch``: a smoke test of a trial, at Determined's path."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from det_lightning import pytorch
from det_lightning.arguments import require
from det_lightning.escaping import get_logger
from det_lightning.hyperparameters import choose_hparams
from det_lightning.missing_parts import attribute_error
from det_lightning.pytorch._pytorch_trial import build_trial, require_trial_class

__all__ = ["test_one_batch"]

logger = get_logger(__name__)


def test_one_batch(trial_class: type[pytorch.PyTorchTrial], config: Mapping[str, Any] | None = None) -> None:
    """Build a trial, train on a batch, validate on a batch, and save a checkpoint; nothing is left behind.

    Args:
        trial_class: the trial's class.
        config: an experiment configuration. Ranges among the ``hyperparameters`` take the middle value, ``categorical``
            the first.

    Raises:
        ValueError: a hyperparameter is of an unknown type, or lacks values.
        Exception: the error of the trial.

    Example:
        >>> from det_lightning.experimental import test_one_batch
        >>> from model_def import MyTrial
        >>> rate = {"type": "log", "base": 10, "minval": -3, "maxval": -1}
        >>> test_one_batch(MyTrial, {"hyperparameters": {"lr": rate, "global_batch_size": 8}})
    """
    require_trial_class("test_one_batch()", trial_class)
    require(config is None or isinstance(config, Mapping), "test_one_batch(config=...)", "a dict", config)
    exp_conf = {**(config or {}), "scheduling_unit": 1}
    hparams = choose_hparams(exp_conf)
    with (
        tempfile.TemporaryDirectory() as storage,
        pytorch.init(
            hparams=hparams, exp_conf=exp_conf, aggregation_frequency=1, enable_tensorboard_logging=False
        ) as context,
    ):
        trainer = pytorch.Trainer(build_trial(trial_class, context), context, enable_progress_bar=False)
        trainer.fit(
            max_length=pytorch.Batch(1),
            step_zero_validation=False,
            test_mode=True,
            checkpoint_policy="all",
            checkpoint_storage=storage,
        )
    logger.info("%s trains, validates and saves.", trial_class.__name__)


# pytest must not collect the function as a test, in spite of the name.
test_one_batch.__test__ = False  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
