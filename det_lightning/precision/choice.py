"""The choice of a precision, by a trial or outside of it, and what follows from it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from det_lightning import errors
from det_lightning.distributed.backend import Backend, GradientPath
from det_lightning.precision.apex_levels import ApexLevels
from det_lightning.precision.casting import CastingForward, halves_to_float
from det_lightning.precision.installed_apex import InstalledApex, apex_is_wanted
from det_lightning.precision.level_models import apply_level, check_parts, configured_parts, put_back, wrapped_ones
from det_lightning.precision.levels import Level, resolve_level
from det_lightning.precision.scaling import LossScaling
from det_lightning.precision.torch_amp import TorchAmp, make_scaler
from det_lightning.precision.whole_models import WholeModelPrecision

logger = logging.getLogger(__name__)


class ChosenPrecision:
    """The precision that a trial trains in: float32 until something else is chosen, which can be done once.

    Args:
        backend: what the trial trains on.
        processes: how many train together.

    Attributes:
        path: the way from a loss to updated parameters.
        scaling: ``path`` where losses are scaled; None in float32.
        scaler: the trial's ``GradScaler``; checkpoints hold its state.
    """

    def __init__(self, backend: Backend, processes: int = 1) -> None:
        self._backend = backend
        self._processes = processes
        self.path: GradientPath = backend.gradients
        self.scaling: LossScaling | None = None
        self.scaler: Any = None
        self._whole_models: WholeModelPrecision | None = None
        self._chosen_by: str | None = None
        self._autocasts = False
        self._has_levels = False

    def use_scaling(self, scaling: LossScaling) -> None:
        """Scale losses from now on."""
        self.path = scaling
        self.scaling = scaling

    # torch.amp

    def register_scaler(self, scaler: Any, models: list[torch.nn.Module]) -> Any:
        """Register a gradient scaler that the trial uses itself, and return it.

        Args:
            scaler: a ``torch.amp.GradScaler``.
            models: those that are wrapped already; there may be none.

        Raises:
            InvalidExperimentException: see ``PyTorchTrialContext.wrap_scaler``.
        """
        self._refuse_two_precisions("wrap_scaler() or experimental.use_amp()")
        if self._has_levels:
            raise errors.InvalidExperimentException(
                "wrap_scaler() after configure_apex_amp(): use either torch.amp or apex levels, not both."
            )
        if self.scaler is not None:
            raise errors.InvalidExperimentException(
                "There is a gradient scaler already: call wrap_scaler() or experimental.use_amp() once."
            )
        if models:
            raise errors.InvalidExperimentException(
                "Call wrap_scaler() or experimental.use_amp() before the first wrap_model()."
            )
        self.scaler = scaler
        self._chosen_by = "wrap_scaler()"
        return scaler

    def use_amp(self, models: list[torch.nn.Module]) -> None:
        """Run forward passes of models to come under autocast, and scale losses and steps.

        Args:
            models: those that are wrapped already; there may be none.

        Raises:
            InvalidExperimentException: see ``PyTorchTrialContext.wrap_scaler``.
        """
        self.register_scaler(make_scaler(), models)
        self._chosen_by = "experimental.use_amp()"
        self._autocasts = True
        self.replace_scaler(self.scaler)

    def replace_scaler(self, scaler: Any) -> None:
        """Use another gradient scaler, also in the place of the one that :meth:`use_amp` made."""
        self.scaler = scaler
        if self._autocasts:
            self.use_scaling(TorchAmp(scaler, self._backend.gradients))

    def autocast_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a model's forward pass run under autocast on a CUDA device, and return float32; return the model.

        Raises:
            InvalidExperimentException: the precision was chosen outside of the trial.
        """
        self._refuse_two_precisions("autocast_forward_pass()")
        self._chosen_by = self._chosen_by or "autocast_forward_pass()"
        cuda = self._backend.device.type == "cuda"
        autocast = ("cuda", torch.get_autocast_dtype("cuda")) if cuda else None
        model.forward = CastingForward(model.forward, outputs=halves_to_float, autocast=autocast)
        return model

    # Models that are wrapped

    def require_no_levels(self, method: str) -> None:
        """Raise if an apex level was configured, after which nothing can be wrapped any more.

        Raises:
            InvalidExperimentException: one was; names ``method``.
        """
        if self._has_levels:
            raise errors.InvalidExperimentException(f"Call {method}() before configure_apex_amp(), not after it.")

    def cast(self, model: torch.nn.Module) -> None:
        """Cast the weights of a model that is about to be wrapped, if the precision asks for it."""
        if self._whole_models is not None:
            self._whole_models.cast(model)

    def surround(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the forward pass of a model that was wrapped compute in the precision; return the model."""
        if self._autocasts:
            return self.autocast_forward(model)
        if self._whole_models is not None:
            self._whole_models.surround(model, self._backend.device)
        return model

    # Chosen outside of the trial

    def use_for_whole_models(self, precision: WholeModelPrecision, models: list[torch.nn.Module]) -> None:
        """Make all models compute in a precision.

        Args:
            precision: for all models.
            models: those that are wrapped already.

        Raises:
            InvalidExperimentException: the trial has chosen one itself, or trained in another one before, or wrapped
                models cannot be cast any more.
        """
        if self._whole_models == precision:
            return
        self._require_changeable(precision, models)
        self._whole_models = precision
        for model in models:
            precision.cast(model)
            precision.surround(model, self._backend.device)
        if precision.scales:
            self.scaler = make_scaler(precision.scaler)
            self.use_scaling(TorchAmp(self.scaler, self._backend.gradients))

    def _require_changeable(self, precision: WholeModelPrecision, models: list[torch.nn.Module]) -> None:
        if self._whole_models is not None:
            raise errors.InvalidExperimentException(
                f"The trial was trained with {self._whole_models.name}, and cannot change to {precision.name}. Build "
                "it again, with the weights of a checkpoint."
            )
        if self._chosen_by is not None:
            raise errors.InvalidExperimentException(
                f"The trial calls {self._chosen_by}, and {precision.name} asks for a precision too. Leave one of "
                "them out."
            )
        if models and precision.casts_weights and self._processes > 1:
            raise errors.InvalidExperimentException(
                f"{precision.name} casts weights, and the trial's models are made ready for {self._processes} "
                "processes already. Give the trial's class to a TrialModule, or cast the models in the trial."
            )

    def _refuse_two_precisions(self, call: str) -> None:
        if self._whole_models is not None:
            raise errors.InvalidExperimentException(
                f"The trial calls {call}, and {self._whole_models.name} asks for a precision too. Leave one of them "
                "out."
            )

    # apex

    def configure_level(
        self,
        given: tuple[Any, Any],
        wrapped: tuple[list[torch.nn.Module], list[torch.optim.Optimizer]],
        opt_level: str | None,
        verbosity: int | None,
        overrides: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Train at one of apex's levels from now on; see ``PyTorchTrialContext.configure_apex_amp``.

        Args:
            given: models and optimizers to configure, each alone or in a list.
            wrapped: all models and optimizers that are wrapped; models that were replaced are replaced in the list.
            opt_level: ``"O0"`` to ``"O3"``.
            verbosity: 0 keeps the log free of what was configured.
            overrides: the other arguments of ``configure_apex_amp`` by name; None leaves what the level says.

        Returns:
            Models and optimizers as they were given, alone or in a list, with what replaced them.

        Raises:
            InvalidExperimentException: see ``PyTorchTrialContext.configure_apex_amp``.
        """
        self._require_no_other_amp()
        level = resolve_level(opt_level, overrides)
        all_models, all_optimizers = wrapped
        models, optimizers = configured_parts(*given)
        check_parts(models, optimizers, all_models, all_optimizers)
        if apex_is_wanted():
            return self._initialize_apex(given, opt_level, verbosity, overrides)
        level = self._on_device(level)
        inner = wrapped_ones(models, all_models)
        changed, masters = apply_level(level, self._backend, inner, optimizers)
        self._use_levels(ApexLevels(level, self._backend, all_optimizers, masters))
        all_models[:] = [changed.get(model, model) for model in all_models]
        if verbosity:
            logger.info("Mixed precision is configured: %s.", level)
        return put_back(given[0], inner, changed), given[1]

    def _on_device(self, level: Level) -> Level:
        if self._backend.device.type != "cpu" or not level.halves:
            return level
        logger.warning(
            "configure_apex_amp(opt_level=%r) on the CPU: bfloat16 takes the place of float16. Loss scaling goes "
            "on as on a GPU; numbers are coarser, and nothing gets faster.",
            level.opt_level,
        )
        return level.on_cpu()

    def _use_levels(self, scaling: LossScaling) -> None:
        self.use_scaling(scaling)
        self._chosen_by = "configure_apex_amp()"
        self._has_levels = True

    def _require_no_other_amp(self) -> None:
        self._refuse_two_precisions("configure_apex_amp()")
        if self.scaler is not None and (self._autocasts or self.scaler.is_enabled()):
            raise errors.InvalidExperimentException(
                "configure_apex_amp() after wrap_scaler() or use_amp(): use either torch.amp or apex levels, not both."
            )
        if self._has_levels:
            raise errors.InvalidExperimentException("configure_apex_amp() was called a second time; call it once.")

    def _initialize_apex(
        self, given: tuple[Any, Any], opt_level: Any, verbosity: Any, overrides: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self._processes > 1:
            raise errors.InvalidExperimentException(
                f"DET_LIGHTNING_AMP=apex trains in one process, and this run has {self._processes}: apex has to "
                "cast models before they are wrapped. Unset it to have the levels on torch.amp."
            )
        apex = InstalledApex(self._backend.gradients)
        arguments = {**overrides, "num_losses": overrides["num_losses"] or 1}
        models, optimizers = apex.initialize(*given, opt_level=opt_level, verbosity=verbosity, **arguments)
        self._use_levels(apex)
        return models, optimizers

    # States

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs into ``state_dict.pth`` beside the state of :attr:`scaler`, by key."""
        return {} if self.scaling is None else self.scaling.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned from the content of a ``state_dict.pth``; warn of what is left over."""
        if self._has_levels and self.scaling is not None:
            self.scaling.load_state_dict(state)
        elif "amp_state" in state:
            logger.warning("The checkpoint has the state of apex's loss scalers, which the trial does not configure.")

    def unfinished(self) -> dict[str, Any]:
        """Return what an aggregation under way has collected beyond the gradients of the models' parameters."""
        return {} if self.scaling is None else self.scaling.unfinished()

    def load_unfinished(self, saved: dict[str, Any]) -> None:
        """Load what :meth:`unfinished` returned; empty if there was no such thing."""
        if self.scaling is not None:
            self.scaling.load_unfinished(saved)
