"""``tf``: TensorFlow with the version 1 behaviour of Estimators, or an error with the command to install TensorFlow."""

from __future__ import annotations

from det_lightning.missing_parts import how_to_install

try:
    import tensorflow as tf
except ModuleNotFoundError as e:
    if e.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        "Estimators need TensorFlow 2.15, the last release with Estimators, on Python 3.9 to 3.11: "
        f"{how_to_install('estimator')}.",
        name="tensorflow",
    ) from None

__all__ = ["tf"]

if not hasattr(tf, "estimator"):
    raise ModuleNotFoundError(
        f"TensorFlow {tf.__version__} has no Estimators; the last release with Estimators is 2.15: "
        f"{how_to_install('estimator')}.",
        name="tensorflow_estimator",
    )

# As in Determined, and before any trial is imported, because graphs and random numbers depend on the behaviour.
tf.compat.v1.disable_v2_behavior()
