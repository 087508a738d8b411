"""The files of Estimator checkpoints: TensorFlow's models, also for serving, and random states as in Determined."""

from __future__ import annotations

import pathlib
import pickle
import random
from typing import Any

import numpy as np

from det_lightning import errors
from det_lightning.checkpoint.format.layout import TENSORFLOW_FILE, require_inside
from det_lightning.checkpoint.safe_load import read_pickle
from det_lightning.escaping import get_logger
from det_lightning.estimator._tensorflow import tf
from det_lightning.pytorch import _random_state

logger = get_logger(__name__)

RNG_FILE = "rng_state.pkl"
#: The states of the ranks, in a subdirectory per rank; unknown to Determined.
RANKS_DIR = "ranks"


def find_model(directory: pathlib.Path) -> str:
    """Return the path of the newest model in a checkpoint, without suffixes of files.

    Raise an ``IncompleteCheckpointError`` if the checkpoint has no model.
    """
    state = tf.train.get_checkpoint_state(str(directory), TENSORFLOW_FILE)
    # Determined left the path on the machine that wrote the checkpoint.
    name = "" if state is None else pathlib.PurePosixPath(state.model_checkpoint_path).name
    if not name or not (directory / f"{name}.index").is_file():
        raise errors.IncompleteCheckpointError(
            f"{directory} is not a complete checkpoint of an Estimator: its file {TENSORFLOW_FILE!r} names "
            f"{name or 'no model'}, which has no index file."
        )
    return str(directory / name)


def write_rng(directory: pathlib.Path, seed: int | None) -> None:
    """Write the random states of Python and numpy, and the ``seed`` of the graph, in Determined's format."""
    state = {"np_rng_state": np.random.get_state(), "random_rng_state": random.getstate(), "tf_rng_global_seed": seed}
    (directory / RNG_FILE).write_bytes(pickle.dumps(state, protocol=4))


def restore_rng(directory: pathlib.Path) -> None:
    """Restore the random states of Python and numpy; without a state in the checkpoint, log a warning."""
    path = directory / RNG_FILE
    if not path.is_file():
        logger.warning("The checkpoint %s has no random state; the random state of the process stays.", directory)
        return
    state = read_pickle(path, with_arrays=True)
    found = {name: state.get(name) for name in ("np_rng_state", "random_rng_state")}
    _random_state.require_rng(found, str(path), without_torch=True)
    _random_state.restore_rng(found)


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
    models = sorted(found.parent for found in directory.glob("**/saved_model.pb"))
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
