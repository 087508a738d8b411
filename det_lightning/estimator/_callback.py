"""The hooks of a trial."""

from __future__ import annotations

from det_lightning.estimator._tensorflow import tf


class RunHook(tf.estimator.SessionRunHook):
    """A ``tf.estimator.SessionRunHook`` with further events; give it to ``tf.estimator.TrainSpec(hooks=...)``."""

    def on_checkpoint_load(self, checkpoint_dir: str) -> None:
        """Run before a run that resumes from a checkpoint begins; on every rank.

        Args:
            checkpoint_dir: directory of the checkpoint.
        """

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Run after each checkpoint, on the chief only. What is written into the directory becomes part of it.

        Args:
            checkpoint_dir: directory of the checkpoint.
        """

    def on_trial_close(self) -> None:
        """Run when a run of the trial ends, however it does."""
