"""``load_estimator_from_checkpoint_path``: loads a model for serving from a checkpoint."""

from __future__ import annotations

import pathlib
from typing import Any

from det_lightning import errors
from det_lightning.checkpoint.format.manifest import require_inside
from det_lightning.estimator._tensorflow import tf

_MODEL = "saved_model.pb"


def load_estimator_from_checkpoint_path(path: str, tags: list[str] | None = None) -> Any:
    """Load the SavedModel from a checkpoint of an ``EstimatorTrial``, written by any release.

    Args:
        path: directory of the checkpoint, or of a model in a checkpoint with several models.
        tags: the tags of the graph to load. Defaults to ``["serve"]``.

    Returns:
        The result of ``tf.saved_model.load``, with the ``signatures`` of the model.

    Raises:
        CheckpointNotFound: there is no SavedModel, because the trial has no ``build_serving_input_receiver_fns``.
        InvalidCheckpointException: there are several SavedModels; the message lists the names.
        UnsafeCheckpointError: a link leads out of the directory.
    """
    directory = pathlib.Path(path)
    require_inside(directory)
    models = sorted(found.parent for found in directory.glob(f"**/{_MODEL}"))
    if not models:
        raise errors.CheckpointNotFound(
            f"There is no SavedModel in {path}. Checkpoints have one for each function that the trial returns from "
            "build_serving_input_receiver_fns()."
        )
    if len(models) > 1:
        names = ", ".join(str(model.relative_to(directory)) for model in models)
        raise errors.InvalidCheckpointException(
            f"There are {len(models)} SavedModels in {path}: {names}. Pass the path of one SavedModel."
        )
    return tf.compat.v1.saved_model.load_v2(str(models[0]), ["serve"] if tags is None else tags)
