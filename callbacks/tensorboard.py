"""``DeterminedTensorBoard``: the callback that writes reports to ``TensorBoardOutput``, with Determined's tags."""

from __future__ import annotations

from typing import Any

from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import require_trial_module
from det_lightning.arguments import wrong_argument
from det_lightning.core._tensorboard import TensorBoardOutput


class DeterminedTensorBoard(pl.Callback):
    """Writes TensorBoard files with Determined's tags; see ``TensorBoardOutput``.

    Args:
        output: ``context.tensorboard`` of the trial's context.

    Example:
        >>> import det_lightning as det
        >>> import pytorch_lightning as pl
        >>> from det_lightning.adapters import TrialModule
        >>> from det_lightning.callbacks import DeterminedTensorBoard
        >>> from model_def import MyTrial
        >>> with det.pytorch.init(hparams={"lr": 0.01, "global_batch_size": 8}) as context:
        ...     callback = DeterminedTensorBoard(context.tensorboard)
        ...     quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        ...     trainer = pl.Trainer(max_steps=2, callbacks=[callback], **quiet)
        ...     trainer.fit(TrialModule(MyTrial(context), context=context))
        >>> len(list(context.get_tensorboard_path().glob("*tfevents*")))
        1
    """

    def __init__(self, output: TensorBoardOutput) -> None:
        if not isinstance(output, TensorBoardOutput):
            raise TypeError(wrong_argument("DeterminedTensorBoard()", "context.tensorboard", output))
        self._output = output

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Subscribe to the reports of the module.

        Raises:
            TypeError: the module is not a ``TrialModule``.
        """
        require_trial_module(self, pl_module).reporters.append(self)

    def report_training(
        self, steps_completed: int, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        """Write the metrics of each batch of a workload, and at ``steps_completed`` batches the metrics of reducers."""
        if self._output.enabled:
            self._output.add_training(steps_completed, avg_metrics, batch_metrics)

    def report_validation(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation after ``steps_completed`` batches."""
        if self._output.enabled:
            self._output.add_validation(steps_completed, metrics)
