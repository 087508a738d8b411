"""Mixed precision as the context offers it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from det_lightning import errors
from det_lightning.core.distributed import DistributedContext
from det_lightning.distributed.backend import Backend, LocalBackend
from det_lightning.precision import (
    ApexLevels,
    InstalledApex,
    Level,
    PlainPrecision,
    Precision,
    TorchAmp,
    WholeModelPrecision,
    apex_is_wanted,
    make_scaler,
    resolve_level,
)
from det_lightning.precision.casting import CastingForward, halves_to_float
from det_lightning.precision.level_models import apply_level, check_parts, configured_parts, put_back, wrapped_ones
from det_lightning.pytorch._settings import RunSettings

__all__ = ["AmpContext"]

logger = logging.getLogger("det_lightning.pytorch")


class AmpContext(RunSettings):
    """The part of a trial's context that chooses a precision; see :class:`PyTorchTrialContext`."""

    def __init__(
        self,
        settings: dict[str, Any],
        distributed: DistributedContext | None,
        backend: Backend | None,
        loading_only: bool,
    ) -> None:
        self.distributed = distributed or DistributedContext()
        super().__init__(**settings, slots=self.distributed.size)
        self.backend: Backend = backend or LocalBackend()
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaler: Any = None
        self.precision: Precision = PlainPrecision(self.backend)
        self.whole_models: WholeModelPrecision | None = None
        self._own_precision: str | None = None
        self._autocasts = False
        self._amp_configured = False
        self._loading_only = loading_only

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.backend.device

    # torch.amp

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler so that checkpoints hold its state; scaling and updating stay with the trial.

        Args:
            scaler: a ``torch.amp.GradScaler`` or ``torch.cuda.amp.GradScaler``. Pass it to ``step_optimizer`` too.

        Raises:
            InvalidExperimentException: there is a scaler already, a model was wrapped before, apex is in use, or the
                precision was chosen outside of the trial.
        """
        self._refuse_two_precisions("wrap_scaler() or experimental.use_amp()")
        if self._amp_configured:
            raise errors.InvalidExperimentException(
                "wrap_scaler() after configure_apex_amp(): use either torch.amp or apex levels, not both."
            )
        if self.scaler is not None:
            raise errors.InvalidExperimentException(
                "There is a gradient scaler already: call wrap_scaler() or experimental.use_amp() once."
            )
        if self.models:
            raise errors.InvalidExperimentException(
                "Call wrap_scaler() or experimental.use_amp() before the first wrap_model()."
            )
        self.scaler = scaler
        self._own_precision = "wrap_scaler()"
        return scaler

    def autocast_forward_pass(self, to_wrap: torch.nn.Module) -> torch.nn.Module:
        """Make a model's forward pass run under autocast, and what it returns in half precision float32.

        The model itself is changed and returned, so that parameters, hooks and attributes stay where they are. Where
        there is no CUDA device autocast changes nothing, as in Determined.
        """
        self._refuse_two_precisions("autocast_forward_pass()")
        self._own_precision = self._own_precision or "autocast_forward_pass()"
        cuda = self.device.type == "cuda"
        autocast = ("cuda", torch.get_autocast_dtype("cuda")) if cuda else None
        to_wrap.forward = CastingForward(to_wrap.forward, outputs=halves_to_float, autocast=autocast)
        return to_wrap

    def _use_amp(self) -> None:
        scaler = self.wrap_scaler(make_scaler())
        self.precision = TorchAmp(scaler, self.backend)
        self._own_precision = "experimental.use_amp()"
        self._autocasts = True

    @property
    def _scaler(self) -> Any:
        # Setting this was the one way to use_amp() with a scaler of other arguments.
        return self.scaler

    @_scaler.setter
    def _scaler(self, scaler: Any) -> None:
        self.scaler = scaler
        if self._autocasts:
            self.precision = TorchAmp(scaler, self.backend)

    # Chosen outside of the trial

    def use_whole_model_precision(self, precision: WholeModelPrecision) -> None:
        """Make all models compute in a precision, those that are wrapped already too.

        Raises:
            InvalidExperimentException: the trial has chosen one itself, or trained in another one before, or wrapped
                models can not be cast any more.
        """
        if self.whole_models == precision:
            return
        if self.whole_models is not None:
            raise errors.InvalidExperimentException(
                f"The trial was trained with {self.whole_models.name}, and can not change to {precision.name}. Build "
                "it anew, with the weights of a checkpoint."
            )
        if self._own_precision is not None:
            raise errors.InvalidExperimentException(
                f"The trial calls {self._own_precision}, and {precision.name} asks for a precision too. Leave one of "
                "them out."
            )
        if self.models and precision.casts_weights and self.distributed.size > 1:
            raise errors.InvalidExperimentException(
                f"{precision.name} casts weights, and the trial's models are made ready for {self.distributed.size} "
                "processes already. Give the trial's class to a TrialModule, or cast the models in the trial."
            )
        self.whole_models = precision
        for model in self.models:
            precision.cast(model)
            precision.surround(model, self.device)
        if precision.scales:
            self.scaler = make_scaler(precision.scaler)
            self.precision = TorchAmp(self.scaler, self.backend)

    def _refuse_two_precisions(self, call: str) -> None:
        if self.whole_models is not None:
            raise errors.InvalidExperimentException(
                f"The trial calls {call}, and {self.whole_models.name} asks for a precision too. Leave one of them out."
            )

    # apex

    def configure_apex_amp(
        self,
        models: Any,
        optimizers: Any,
        enabled: bool | None = True,
        opt_level: str | None = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int | None = 1,
        verbosity: int | None = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> tuple[Any, Any]:
        """Configure the precision of models and optimizers by apex's levels; docs/precision.md describes them.

        Use what is returned. On the CPU bfloat16 takes the place of float16, with a warning.

        Args:
            models: what ``wrap_model`` returned, one or a list.
            optimizers: what ``wrap_optimizer`` returned, one or a list.
            enabled: False leaves everything as it is.
            opt_level: ``"O0"`` (float32), ``"O1"`` (autocast), ``"O2"`` (half precision with float32 masters and batch
                norms), ``"O3"`` (half precision).
            cast_model_type: what weights and inputs are cast to.
            patch_torch_functions: run forward passes under autocast.
            keep_batchnorm_fp32: leave batch norms in float32; also as a string.
            master_weights: make optimizers update float32 copies.
            loss_scale: a number, also as a string, or ``"dynamic"``.
            cast_model_outputs: what outputs are cast to; float32 by default.
            num_losses: number of losses in a batch with a scaler of their own; 1 scales all losses alike.
            verbosity: 0 keeps the log free of what was configured.
            min_loss_scale: where a dynamic scale ends to be halved.
            max_loss_scale: where a dynamic scale ends to be doubled.

        Returns:
            Models and optimizers, each alone or as a list, as given.

        Raises:
            InvalidExperimentException: an argument is wrong, a model or an optimizer is not wrapped or does not belong
                to the others, a model is in half precision already; it is a second call, or torch.amp is in use.
        """
        if not enabled or self._loading_only:
            return models, optimizers
        self._require_no_other_amp()
        # None is apex's word for an argument that was left out, and there the property stays as the level has it.
        arguments = {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
            "cast_model_outputs": cast_model_outputs,
            "num_losses": num_losses,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        level = resolve_level(opt_level, arguments)
        given_models, given_optimizers = configured_parts(models, optimizers)
        check_parts(given_models, given_optimizers, self.models, self.optimizers)
        if apex_is_wanted():
            return self._initialize_apex(models, optimizers, opt_level, verbosity, arguments)
        wrapped = wrapped_ones(given_models, self.models)
        changed = self._configure_level(level, wrapped, given_optimizers)
        if verbosity:
            logger.info("Mixed precision is configured: %s.", level)
        return put_back(models, wrapped, changed), optimizers

    def _configure_level(
        self, level: Level, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
    ) -> dict[torch.nn.Module, torch.nn.Module]:
        """Train at a level from now on; return what took the places of models."""
        if self.device.type == "cpu" and level.halves:
            level = level.on_cpu()
            logger.warning(
                "configure_apex_amp(opt_level=%r) on the CPU: bfloat16 takes the place of float16. Loss scaling goes "
                "on as on a GPU; numbers are coarser, and nothing gets faster.",
                level.opt_level,
            )
        changed, masters = apply_level(level, self.backend, models, optimizers)
        self.precision = ApexLevels(level, self.backend, self.optimizers, masters)
        self._own_precision, self._amp_configured = "configure_apex_amp()", True
        self.models[:] = [changed.get(model, model) for model in self.models]
        return changed

    def _require_no_other_amp(self) -> None:
        self._refuse_two_precisions("configure_apex_amp()")
        if self.scaler is not None and (self._autocasts or self.scaler.is_enabled()):
            raise errors.InvalidExperimentException(
                "configure_apex_amp() after wrap_scaler() or use_amp(): use either torch.amp or apex levels, not both."
            )
        if self._amp_configured:
            raise errors.InvalidExperimentException("configure_apex_amp() was called a second time; call it once.")

    def _initialize_apex(
        self, models: Any, optimizers: Any, opt_level: Any, verbosity: Any, arguments: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self.distributed.size > 1:
            raise errors.InvalidExperimentException(
                f"DET_LIGHTNING_AMP=apex trains in one process, and this run has {self.distributed.size}: apex has to "
                "cast models before they are wrapped. Unset it to have the levels on torch.amp."
            )
        apex = InstalledApex(self.backend)
        arguments = {**arguments, "num_losses": arguments["num_losses"] or 1}
        models, optimizers = apex.initialize(models, optimizers, opt_level=opt_level, verbosity=verbosity, **arguments)
        self.precision = apex
        self._own_precision, self._amp_configured = "configure_apex_amp()", True
        return models, optimizers

    def _require_before_amp(self, method: str) -> None:
        if self._amp_configured:
            raise errors.InvalidExperimentException(f"Call {method}() before configure_apex_amp(), not after it.")
