"""The hooks of a trial."""

from __future__ import annotations

from det_lightning.estimator._tensorflow import tf


class RunHook(tf.estimator.SessionRunHook):
    """A ``tf.estimator.SessionRunHook`` with more events; pass it to ``tf.estimator.TrainSpec(hooks=...)``."""

    def on_checkpoint_load(self, checkpoint_dir: str) -> None:
        """Called on every rank before a run resumes from a checkpoint.

        Args:
            checkpoint_dir: directory of the checkpoint.
        """

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Called after each checkpoint, on the chief only. Files written to the directory become part of it.

        Args:
            checkpoint_dir: directory of the checkpoint.
        """

    def on_trial_close(self) -> None:
        """Called when a run of the trial ends, whether or not it succeeded."""
