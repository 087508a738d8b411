"""``RunHook``: a session hook with the events of a run, for trials to subclass."""

from __future__ import annotations

from det_lightning.estimator._tensorflow import tf


class RunHook(tf.estimator.SessionRunHook):
    """A ``tf.estimator.SessionRunHook`` with more events, for ``tf.estimator.TrainSpec(hooks=...)``."""

    def on_checkpoint_load(self, checkpoint_dir: str) -> None:
        """Run on every rank before a run resumes from the checkpoint in the directory ``checkpoint_dir``."""

    def on_checkpoint_end(self, checkpoint_dir: str) -> None:
        """Run on the chief after each checkpoint. Files written to ``checkpoint_dir`` become part of the checkpoint."""

    def on_trial_close(self) -> None:
        """Run when a run of the trial ends, even after an error."""
