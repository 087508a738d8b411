"""Watching a trial train: a subclass of its class, and two callbacks around its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from det_lightning.pytorch.callback import PyTorchCallback
from det_lightning.testing.observation.observer import CHECKPOINTED, Observer

__all__ = ["observed"]

_FIRST, _LAST = "det_lightning.testing", "det_lightning.testing.last"


class _First(PyTorchCallback):
    """Hears of every event before the trial's own callbacks."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self._observer.batches = first_batch_idx
        self._observer.stage = "while its data loaders are built"

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self._observer.stage = "while a checkpoint is loaded"

    def on_training_start(self) -> None:
        self._observer.begin_training()

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self._observer.tell("on_training_epoch_start", epoch_idx=epoch_idx)

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self._observer.tell("on_training_epoch_end", epoch_idx=epoch_idx)

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self._observer.tell("on_training_workload_end", avg_metrics=avg_metrics)

    def on_validation_start(self) -> None:
        self._observer.tell("on_validation_start")
        self._observer.stage = f"in the validation after {self._observer.batches} batches"

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self._observer.tell("on_checkpoint_save_start")
        self._observer.stage = f"while a checkpoint is written after {self._observer.batches} batches"
        self._observer.read_state(self._observer.batches)

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._observer.tell(CHECKPOINTED)

    def on_trial_shutdown(self) -> None:
        self._observer.read_state("end")


class _Last(PyTorchCallback):
    """Hears of a validation after the trial's own callbacks, which may change its metrics."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._observer.validated(metrics)


def observed(trial_class: type, observer: Observer) -> type:
    """Return ``trial_class`` with its steps written down; it goes by the same name."""

    def wrapped(method: str, stage: str) -> Callable[..., Any]:
        original = getattr(trial_class, method)

        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            observer.stage = stage
            loader = original(self, *args, **kwargs)
            if method == "build_training_data_loader":
                observer.note_length(loader)
            return loader

        return run

    @functools.wraps(trial_class.__init__)  # type: ignore[misc]
    def build(self: Any, context: Any, *args: Any, **kwargs: Any) -> None:
        observer.build(self, context)
        trial_class.__init__(self, context, *args, **kwargs)  # type: ignore[misc]

    @functools.wraps(trial_class.train_batch)  # type: ignore[attr-defined]
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_idx = kwargs["batch_idx"]
        observer.begin_batch(kwargs.get("batch"), batch_idx)
        metrics = trial_class.train_batch(self, *args, **kwargs)  # type: ignore[attr-defined]
        observer.end_batch(metrics, batch_idx)
        return metrics

    @functools.wraps(trial_class.build_callbacks)  # type: ignore[attr-defined]
    def build_callbacks(self: Any) -> Any:
        observer.stage = "while its callbacks are built"
        callbacks = trial_class.build_callbacks(self)  # type: ignore[attr-defined]
        observer.take_callbacks(callbacks)
        if not isinstance(callbacks, dict):
            return callbacks
        return {_FIRST: _First(observer), **callbacks, _LAST: _Last(observer)}

    members = {
        "__init__": build,
        "__module__": trial_class.__module__,
        "__qualname__": trial_class.__qualname__,
        "__doc__": trial_class.__doc__,
        "train_batch": train_batch,
        "build_callbacks": build_callbacks,
        "build_training_data_loader": wrapped("build_training_data_loader", "in build_training_data_loader()"),
        "build_validation_data_loader": wrapped("build_validation_data_loader", "in build_validation_data_loader()"),
    }
    return type(trial_class.__name__, (trial_class,), members)
