"""``ChosenPrecision``: chooses and applies the precision of a trial, from within the trial or from outside."""

from __future__ import annotations

from typing import Any

import torch

from det_lightning import errors
from det_lightning.distributed.backend import Backend, GradientExchange
from det_lightning.escaping import get_logger
from det_lightning.precision.apex_levels import ApexLevels, ApexScaling, InstalledApex, wants_apex
from det_lightning.precision.casting import FLOAT32, CastingForward, WholeModelPrecision, apply_level, halves_to_float
from det_lightning.precision.levels import check_parts, list_parts, put_back, resolve_level
from det_lightning.precision.scaling import LossScaling, TorchAmp, make_scaler

logger = get_logger(__name__)


class ChosenPrecision:
    """The precision of a trial: float32 until another precision is chosen, once.

    ``models`` and ``optimizers`` hold all wrapped parts. ``path`` leads from a loss to updated parameters: ``scaling``
    if ``scales_losses``, else the backend's exchange of gradients. ``whole_models`` is the precision chosen outside of
    the trial.
    """

    def __init__(self, backend: Backend, processes: int = 1, loading_only: bool = False) -> None:
        self._backend = backend
        self._processes = processes
        self._loading_only = loading_only
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._stop_scaling()
        self.whole_models = FLOAT32
        self._chosen_by: str | None = None
        self._autocasts = False

    def _stop_scaling(self) -> None:
        self.path: GradientExchange | LossScaling = self._backend.gradients
        self.scaling = LossScaling(self._backend.gradients)
        self.scales_losses = False
        self._scaler: Any = None

    def use_scaling(self, scaling: LossScaling) -> None:
        """Scale losses from now on."""
        self.path = self.scaling = scaling
        self.scales_losses = True

    @property
    def _has_levels(self) -> bool:
        return isinstance(self.scaling, ApexScaling)

    # torch.amp

    def wrap_scaler(self, scaler: Any) -> Any:
        """Register a gradient scaler, so that checkpoints hold the state; the trial does the scaling and the updates.

        Args:
            scaler: a ``torch.amp.GradScaler`` or ``torch.cuda.amp.GradScaler``, to pass to ``step_optimizer`` too.

        Raises:
            InvalidExperimentException: there already is a scaler or a wrapped model, apex is in use, or the precision
                was chosen outside of the trial.
        """
        call = "wrap_scaler() or experimental.use_amp()"
        self._refuse_two_precisions(call)
        if self._has_levels:
            raise errors.InvalidExperimentException(
                f"{call} was called after configure_apex_amp(), which scales losses already: use either torch.amp or "
                "apex levels, not both, and leave the other call out."
            )
        if self.scaler is not None:
            raise errors.InvalidExperimentException(
                f"There is a gradient scaler already, by {self._chosen_by}. Call {call} once."
            )
        if self.models:
            raise errors.InvalidExperimentException(f"Call {call} before the first wrap_model().")
        self.scaler = scaler
        self._chosen_by = "wrap_scaler()"
        return scaler

    def use_amp(self) -> None:
        """Run forward passes under autocast and let the context scale losses and steps.

        Raise an InvalidExperimentException if called after ``wrap_model`` or another choice of precision. Without a
        CUDA device the scaler is disabled.
        """
        scaler = self.wrap_scaler(make_scaler())
        self._chosen_by = "experimental.use_amp()"
        self._autocasts = True
        self.scaler = scaler

    @property
    def scaler(self) -> Any:
        """The gradient scaler of ``wrap_scaler`` or ``use_amp``, or None. Can be replaced."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self._scaler = scaler
        if self._autocasts:
            self.use_scaling(TorchAmp(scaler, self._backend.gradients))

    def autocast_forward_pass(self, to_wrap: torch.nn.Module) -> torch.nn.Module:
        """Make a model's forward pass run under autocast, and return float32 in place of half precision.

        The same model is changed and returned, with the same parameters, hooks and attributes. Without a CUDA device
        there is no autocast, as in Determined.
        """
        self._refuse_two_precisions("autocast_forward_pass()")
        self._chosen_by = self._chosen_by or "autocast_forward_pass()"
        on_cuda = self._backend.device.type == "cuda"
        autocast = ("cuda", torch.get_autocast_dtype("cuda")) if on_cuda else None
        to_wrap.forward = CastingForward(to_wrap.forward, outputs=halves_to_float, autocast=autocast)
        return to_wrap

    # Wrapped models

    def require_no_levels(self, method: str) -> None:
        """Raise an error that names ``method`` if an apex level was configured: wrap everything before."""
        if self._has_levels:
            raise errors.InvalidExperimentException(f"Call {method}() before configure_apex_amp(), not after it.")

    def surround(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the forward pass of a wrapped model compute in the precision; return the model."""
        if self._autocasts:
            return self.autocast_forward_pass(model)
        self.whole_models.surround(model, self._backend.device)
        return model

    # Chosen outside of the trial

    def use_whole_model_precision(self, precision: WholeModelPrecision | None) -> None:
        """Make all models, wrapped before or later, compute in a precision; None means float32.

        Raise an InvalidExperimentException if the trial has chosen a precision, was cast to another precision, or has
        wrapped models that can no longer be cast.
        """
        precision = precision or FLOAT32
        if self.whole_models == precision:
            return
        if self.whole_models != FLOAT32:
            self._leave(self.whole_models, precision.name)
        if precision == FLOAT32:
            return
        if chosen_by := "configure_apex_amp()" if self._has_levels else self._chosen_by:
            raise _two_precisions(chosen_by, precision)
        if self.models and precision.casts_weights and self._processes > 1:
            raise errors.InvalidExperimentException(
                f"{precision.name} casts weights, and the trial's models are wrapped for {self._processes} processes "
                "already. Pass the trial's class to a TrialModule, or cast the models in the trial."
            )
        self.whole_models = precision
        for model in self.models:
            precision.cast(model)
            precision.surround(model, self._backend.device)
        if precision.scales:
            self.scaler = make_scaler(precision.scaler)
            self.use_scaling(TorchAmp(self.scaler, self._backend.gradients))

    def _leave(self, before: WholeModelPrecision, wanted: str) -> None:
        """Let models compute in float32 again."""
        if before.casts_weights or not all(isinstance(model.forward, CastingForward) for model in self.models):
            raise errors.InvalidExperimentException(
                f"The trial was trained with {before.name}, and cannot change to {wanted}. Build the trial again, with "
                "the weights of a checkpoint."
            )
        for model in self.models:
            surrounding: Any = model.forward
            model.forward = surrounding.forward
        if before.scales:
            self._stop_scaling()
        self.whole_models = FLOAT32

    def _refuse_two_precisions(self, call: str) -> None:
        if self.whole_models != FLOAT32:
            raise _two_precisions(call, self.whole_models)

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
        """Configure the precision of models and optimizers by apex's levels; see docs/precision.md.

        Use the returned models and optimizers from then on. On the CPU bfloat16 replaces float16, with a warning.

        Args:
            models: a model that ``wrap_model`` returned, or a list.
            optimizers: an optimizer that ``wrap_optimizer`` returned, or a list.
            enabled: if False, nothing is changed.
            opt_level: ``"O0"`` (float32), ``"O1"`` (autocast), ``"O2"`` (half precision with float32 masters and batch
                norms), ``"O3"`` (half precision).
            cast_model_type: the type of weights and inputs.
            patch_torch_functions: run forward passes under autocast.
            keep_batchnorm_fp32: leave batch norms in float32; may be a string.
            master_weights: make optimizers update float32 copies.
            loss_scale: a number, maybe as a string, or ``"dynamic"``.
            cast_model_outputs: the type of outputs; float32 by default.
            num_losses: number of losses in a batch, with a scaler each; 1 scales all losses alike.
            verbosity: 0 logs nothing.
            min_loss_scale, max_loss_scale: the bounds of a dynamic scale.

        Returns:
            Models and optimizers, each alone or as a list, as given.

        Raises:
            InvalidExperimentException: an argument is wrong, a model or optimizer is not wrapped, an optimizer has no
                parameters of the models, a model is already in half precision; a second call; or torch.amp is in use.
        """
        if not enabled or self._loading_only:
            return models, optimizers
        # As in apex, None stands for the level's value.
        overrides = {
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
        self._require_no_other_amp()
        level = resolve_level(opt_level, overrides)
        chosen_models = list_parts("models", models, torch.nn.Module)
        chosen_optimizers = list_parts("optimizers", optimizers, torch.optim.Optimizer)
        check_parts(chosen_models, chosen_optimizers, self.models, self.optimizers)
        if wants_apex():
            return self._initialize_apex((models, optimizers), opt_level=opt_level, verbosity=verbosity, **overrides)
        level = level.on_device(self._backend.device)
        changed, masters = apply_level(level, self._backend, chosen_models, chosen_optimizers)
        self.use_scaling(ApexLevels(level, self._backend, self.optimizers, masters))
        self.models[:] = [changed.get(model, model) for model in self.models]
        if verbosity:
            logger.info("Mixed precision is configured: %s.", level)
        return put_back(models, changed), optimizers

    def _require_no_other_amp(self) -> None:
        self._refuse_two_precisions("configure_apex_amp()")
        if self.scaler is not None and (self._autocasts or self.scaler.is_enabled()):
            raise errors.InvalidExperimentException(
                f"configure_apex_amp() was called after {self._chosen_by}, which scales losses already: use either "
                "torch.amp or apex levels, not both, and leave the other call out."
            )
        if self._has_levels:
            raise errors.InvalidExperimentException(
                "configure_apex_amp() was called a second time, and each precision is chosen once. Call it once, with "
                "lists of all models and optimizers: configure_apex_amp([generator, critic], [optimizer, other])."
            )

    def _initialize_apex(self, given: tuple[Any, Any], **arguments: Any) -> tuple[Any, Any]:
        if self._processes > 1:
            raise errors.InvalidExperimentException(
                f"DET_LIGHTNING_AMP=apex trains in one process, and this run has {self._processes}: apex must cast "
                "models before wrapping. Unset the variable to have the levels on torch.amp."
            )
        apex = InstalledApex(self._backend.gradients)
        configured = apex.initialize(*given, **arguments)
        self.use_scaling(apex)
        return configured


def _two_precisions(call: str, precision: WholeModelPrecision) -> errors.InvalidExperimentException:
    return errors.InvalidExperimentException(
        f"The trial calls {call}, and {precision.name} asks for a precision too. Leave out one of the two."
    )
