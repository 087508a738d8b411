"""The base of ``TrialModule``, for use without a run: the built trial, loading weights, predictions and tests."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch
from typing_extensions import Self

from det_lightning import errors
from det_lightning.adapters import flags, lightning_internals
from det_lightning.adapters.building import TrialBuilder
from det_lightning.adapters.call_dataloaders import take_only_loader
from det_lightning.adapters.hooks import DrivenModule, requires_super
from det_lightning.adapters.lightning_checkpoint import SavedTrial, rename_models
from det_lightning.adapters.reporting import as_tensors
from det_lightning.checkpoint.format.content import CheckpointReading
from det_lightning.core._reports import select_scalars
from det_lightning.engine.data_stream import LoaderFactory, length_or_none
from det_lightning.engine.loaders import ShownLoader
from det_lightning.engine.metrics import RankExchange, reduce_validation_metrics, to_numpy
from det_lightning.engine.train_and_evaluate import Evaluation
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial, original_trial
from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.pytorch._weights import load_models


class GivenEvaluation:
    """Evaluates a trial on data of a call, without the trial's callbacks."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, loaders: Any) -> None:
        self._trial = trial
        self._context = context
        original = original_trial(trial)
        self._evaluation = Evaluation(trial, original, context)
        if not self._evaluation.by_batch and context.distributed.size > 1:
            raise errors.UnsupportedTrainerFlags(
                f"test() of {type(original).__name__}, which has evaluate_full_dataset(), works in one "
                f"process; this run has {context.distributed.size}."
            )
        self._loader = take_only_loader(loaders, "test_dataloader")
        self._has_begun = False
        context.reducers.reset_reducers()

    def has_begun(self) -> bool:
        """Return whether any rank has had a batch; all ranks must call this."""
        return any(self._context.distributed.allgather(self._has_begun))

    def evaluate(self, batch: Any) -> None:
        """Evaluate a batch on the device, unless the trial evaluates the full dataset."""
        self._has_begun = True
        if self._evaluation.by_batch:
            self._evaluation.evaluate(iter([batch]), lambda: True)

    def close(self) -> dict[str, float]:
        """Return the metrics over all batches and ranks; all ranks must call this."""
        exchange = RankExchange(self._context.distributed)
        if self._evaluation.by_batch:
            reducer = self._trial.evaluation_reducer()
            metrics, _ = reduce_validation_metrics(self._evaluation.close(), reducer, exchange)
        else:
            self._evaluation.evaluate_full_dataset(self._loader)
            metrics = self._evaluation.full_metrics
        metrics.update(
            to_numpy(self._context.reducers.reduce_metrics(for_training=False, allgather_fn=exchange.allgather))
        )
        return select_scalars(metrics)


class PlainOptimizer:
    """Gives an optimizer of another library the attributes and methods of torch's optimizers that Lightning looks for.

    The trial steps the optimizer itself; Lightning only saves and loads the state. The methods are spelled out because
    since Python 3.12 Lightning's check of its protocol ``Optimizable`` ignores ``__getattr__``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.param_groups: list[dict[Any, Any]] = getattr(optimizer, "param_groups", [])
        self.defaults: dict[Any, Any] = getattr(optimizer, "defaults", {})
        self.state: Any = getattr(optimizer, "state", {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, with the closure if there is one."""
        return self._optimizer.step(*([] if closure is None else [closure]))

    def zero_grad(self, *arguments: Any, **keywords: Any) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad(*arguments, **keywords)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from a checkpoint."""
        self._optimizer.load_state_dict(state_dict)


class InferenceModule(DrivenModule):
    """The part of a ``TrialModule`` that needs no run: the trial, ``module(x)``, ``trainer.predict`` and ``test``.

    Attributes:
        trial: the trial, or None before the trial is built.
        context: the context of the trial.
        runnable: the trial, adapted if the trial is a legacy trial.
        models: the models of the trial; their names in a ``.ckpt`` file begin with ``models.<index>.``.
    """

    trial_builder: TrialBuilder

    def __init__(self) -> None:
        super().__init__()
        flags.warn_of_mixture()
        self.trial: PyTorchTrial | None = None
        self.context: PyTorchTrialContext | None = None
        self.runnable: PyTorchTrial | None = None
        self._loaded: PyTorchTrialContext | None = None
        self._tested: GivenEvaluation | None = None
        self._modes: list[tuple[torch.nn.Module, bool]] = []

    @lightning_internals.restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805 (a classmethod)
        checkpoint_path: str | os.PathLike[str] | IO[Any],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a module with a built trial and the weights of a checkpoint, without a trainer.

        ``module(x)`` predicts. ``pl.Trainer`` builds the trial again, on the trainer's device, with the current weights
        of the module.

        Args:
            checkpoint_path: path, URL or open file of a ``.ckpt`` file from a ``TrialModule``; or the path or URL of a
                directory in Determined's format.
            map_location: where to load tensors to, as in ``torch.load``. Defaults to the device of each saved tensor,
                if available.
            hparams_file: YAML file with hyperparameters, in place of the hyperparameters in the checkpoint.
            strict: False ignores weights that only the checkpoint or only the trial has.
            weights_only: False unpickles any object, running any code in the checkpoint, as a trusting ``reading=``.
            **kwargs: arguments of the module: the class of the trial as ``trial=``. ``hparams`` and ``exp_conf``
                default to the values in the checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, unsafe, or from another module or trial.
            TypeError: ``trial=`` is missing.
        """
        reading = kwargs.get("reading") or CheckpointReading()
        if weights_only is not None:
            reading = dataclasses.replace(reading, trusted=not weights_only)
        saved = SavedTrial(checkpoint_path, reading, map_location)
        module: Self = cls(**saved.arguments(cls, kwargs, hparams_file))
        module.build_from(saved, module.strict_loading if strict is None else strict)
        return module

    def build_from(self, saved: SavedTrial, strict: bool = True) -> None:
        """Build the trial on the device of a saved trial, and load the saved weights."""
        device = saved.device()
        runnable, context = self.trial_builder.build_alone(device)
        saved.load_into(context, strict)
        self.adopt_trial(runnable, context)
        self._loaded = context
        self.load_state_dict({**self.state_dict(), **saved.get_rest_of_module()}, strict)
        self.to(device)

    def adopt_trial(self, runnable: PyTorchTrial, context: PyTorchTrialContext) -> None:
        """Take a built trial, with the weights that :meth:`build_from` loaded, if any."""
        if self._loaded is not None and self._loaded is not context:
            flags.refuse_lost_changes(self._loaded.models, context.models)
            weights = [model.state_dict() for model in self._loaded.models]
            load_models(context, {"models_state_dict": weights}, "The module that was loaded from a checkpoint")
            self._loaded = None
        self.runnable = runnable
        self.context = context
        self.trial = original_trial(runnable)
        self.models = torch.nn.ModuleList(context.models)

    def build_training_loader(self) -> ShownLoader:
        """Return the training data outside of a run; if the trial is not built yet, one is built for this."""
        return self._build_loader(LoaderFactory.build_training)

    def build_validation_loader(self) -> ShownLoader:
        """Return the validation data outside of a run; see :meth:`build_training_loader`."""
        return self._build_loader(LoaderFactory.build_validation)

    def _build_loader(self, build: Callable[[LoaderFactory], Any]) -> ShownLoader:
        with isolated_rng():
            is_built = self.context is not None
            made = self.require_built_trial() if is_built else self.trial_builder.build_alone(torch.device("cpu"))
            loader = build(LoaderFactory(*made))
            return ShownLoader(loader, length_or_none(loader))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters; see ``torch.nn.Module``. Warn if the trial is not built yet."""
        if self.context is None:
            flags.warn_of_missing_parameters(self)
        return super().named_parameters(*args, **kwargs)

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Call a function for each module; see ``torch.nn.Module``. Warn if the trial is not built yet."""
        is_lightnings = str(fn.__module__).partition(".")[0] in ("lightning", "lightning_fabric")  # as in module.to()
        if self.context is None and not is_lightnings:
            flags.warn_of_missing_parameters(self)
        return super().apply(fn)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights; see ``torch.nn.Module``. Warn if the trial is not built yet."""
        if self.context is None:
            flags.warn_of_missing_parameters(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, also under their names in distributed training.

        The trial is built first if necessary, without a trainer: Lightning loads the weights from processes that it
        started into the module of the main process. Raise an InvalidCheckpointException if the weights do not fit.
        """
        if self.context is None:
            runnable, context = self.trial_builder.build_alone(torch.device("cpu"))
            self.adopt_trial(runnable, context)
            self._loaded = context
        expected = self.state_dict()
        if not state_dict.keys() <= expected.keys():
            state_dict = rename_models(state_dict, expected)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as e:
            raise errors.InvalidCheckpointException(
                f"The weights do not fit the module: {e} strict=False, or strict_loading = False in the module, "
                "leaves out weights that only one side has."
            ) from e

    def require_built_trial(self) -> tuple[PyTorchTrial, PyTorchTrialContext]:
        """Return the trial, adapted if legacy, and its context; raise an InternalException if not built yet."""
        if self.runnable is None or self.context is None:
            raise errors.InternalException(
                "The trial is not built yet: fit(), validate(), test() and predict() of pl.Trainer build the trial "
                "when they have chosen the device, and TrialModule.load_from_checkpoint(path, trial=...) builds the "
                "trial at once."
            )
        return self.runnable, self.context

    @requires_super(
        "make the optimizers and schedulers in the trial's __init__, with wrap_optimizer() and wrap_lr_scheduler()"
    )
    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers of the trial's context."""
        _, context = self.require_built_trial()
        known = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        schedulers = [wrapped.scheduler for wrapped in context.lr_schedulers if isinstance(wrapped.scheduler, known)]
        optimizers = [
            optimizer if isinstance(optimizer, torch.optim.Optimizer) else PlainOptimizer(optimizer)
            for optimizer in context.optimizers
        ]
        self.called_super["configure_optimizers"] = optimizers
        return optimizers, schedulers

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value from any hook, as ``LightningModule.log`` does; a step need not give its ``batch_size``."""
        if kwargs.get("batch_size") is None:
            kwargs["batch_size"] = lightning_internals.find_batch_size(self, counts=bool(kwargs.get("on_epoch")))
        super().log(name, value, *args, **kwargs)

    # Gradients and modes: the run decides

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep the trial's gradients: Lightning would clear gradients at the start of each run."""

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients: an aggregation may be unfinished."""

    def on_validation_model_eval(self) -> None:
        """Put all modules into evaluation mode except the trial's models, whose modes the run changes."""
        own = [module for name, module in self.named_modules() if name.partition(".")[0] != "models"]
        # With Determined's API the models stay in evaluation mode until the next batch.
        self._modes = [
            (module, module.training) for module in (self.modules() if self.trial_builder.owns_context else own)
        ]
        for module in own:
            module.training = False

    def on_validation_model_train(self) -> None:
        """Restore the modes that modules had before the validation."""
        for module, mode in self._modes:
            module.training = mode

    # Prediction

    def _on_device(self, batch: Any) -> Any:
        """Return a batch on the device, with numpy arrays as tensors too, as in the trial's own batches."""
        _, context = self.require_built_trial()
        cast = context.precision.whole_models.batch_cast()
        batch = context.to_device(batch) if context.experimental.auto_to_device else batch
        return batch if cast is None else cast(batch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the trial's ``predict_batch``, or else of its only model.

        Raises:
            InvalidExperimentException: the trial has no ``predict_batch``, and none or several models.
            InternalException: the trial is not built yet.
        """
        models = self.require_built_trial()[1].models
        predict_batch = getattr(self.trial, "predict_batch", None)
        if predict_batch is None and len(models) != 1:
            raise errors.InvalidExperimentException(
                f"{type(self.trial).__name__} wraps {len(models)} models: define predict_batch(self, batch) in the "
                "trial, and return the predictions for a batch."
            )
        return (predict_batch or models[0])(*args, **kwargs)

    def begin_prediction(self) -> None:
        """Place the models for a prediction."""
        self.require_built_trial()[1].backend.placement.begin_validation(in_step=False)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the predictions for a batch; see :meth:`forward`."""
        batch = self._on_device(batch)
        predict_batch = getattr(self.trial, "predict_batch", None)
        if predict_batch is None:
            return self(batch[0] if isinstance(batch, list | tuple) and batch else batch)
        takes_batch_idx = "batch_idx" in inspect.signature(predict_batch).parameters
        return predict_batch(batch, batch_idx=batch_idx) if takes_batch_idx else predict_batch(batch)

    def end_evaluation(self) -> None:
        """End a prediction or a test."""
        self.require_built_trial()[1].backend.placement.end_validation()

    # Evaluation of given data

    def begin_test(self) -> None:
        """Place the models for a test, and begin to collect metrics."""
        runnable, context = self.require_built_trial()
        context.backend.placement.begin_validation(in_step=False)
        self._tested = GivenEvaluation(runnable, context, self.trainer.test_dataloaders)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch of the given data."""
        assert self._tested is not None
        self._tested.evaluate(self._on_device(batch))

    def end_test_epoch(self) -> None:
        """Log the metrics over all batches and ranks."""
        assert self._tested is not None
        if type(self).test_step is not InferenceModule.test_step and not self._tested.has_begun():
            return  # a subclass evaluates the data itself
        self.log_dict(as_tensors(self._tested.close()), prog_bar=True, on_epoch=True, batch_size=1)
