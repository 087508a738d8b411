"""``ChosenPrecision``: choosing and applying the precision of a trial, and casting models, inputs and outputs."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.distributed.backend import Backend, GradientExchange, WeightCast, named_tensors
from det_lightning.escaping import get_logger
from det_lightning.precision.apex_levels import ApexLevels, ApexScaling, InstalledApex, wants_apex
from det_lightning.precision.levels import HALF_TYPES, Level, check_parts, list_parts, put_back, resolve_level
from det_lightning.precision.scaling import LossScaling, TorchAmp, make_scaler

logger = get_logger(__name__)


class ChosenPrecision:
    """The precision of a trial: float32 until another precision is chosen, once.

    ``models`` and ``optimizers`` hold all wrapped parts. ``path`` leads from a loss to updated parameters: ``scaling``
    if ``scales_losses``, else the backend's all-reduce of gradients. ``whole_models`` is the precision chosen outside
    of the trial.
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

    def use_scaling(self, scaling: LossScaling) -> None:
        """Scale losses from now on."""
        scaling.scaler = self.scaling.scaler
        self.path = self.scaling = scaling
        self.scales_losses = True

    @property
    def _has_levels(self) -> bool:
        return isinstance(self.scaling, ApexScaling)

    # torch.amp

    def wrap_scaler(self, scaler: Any) -> Any:
        return self._take_scaler(scaler, "wrap_scaler()")

    def _take_scaler(self, scaler: Any, call: str) -> Any:
        self._refuse_two_precisions(call, self.whole_models != FLOAT32 or self._has_levels or self.scaler is not None)
        if self.models:
            raise errors.InvalidExperimentException(f"Call {call} before the first wrap_model().")
        self.scaler = scaler
        self._chosen_by = call
        return scaler

    def use_amp(self) -> None:
        scaler = self._take_scaler(make_scaler(), "experimental.use_amp()")
        self._autocasts = True
        self.scaler = scaler

    @property
    def scaler(self) -> Any:
        """The gradient scaler of ``wrap_scaler`` or ``use_amp``, or None. Can be replaced."""
        return self.scaling.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self.scaling.scaler = scaler
        if self._autocasts:
            self.use_scaling(TorchAmp(scaler, self._backend.gradients))

    def autocast_forward_pass(self, to_wrap: torch.nn.Module) -> torch.nn.Module:
        self._refuse_two_precisions("autocast_forward_pass()", self.whole_models != FLOAT32)
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
        """Make all models, already wrapped or not, compute in a precision; None means float32.

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
        self._refuse_two_precisions(precision.name, self._has_levels or self._chosen_by is not None)
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

    def _refuse_two_precisions(self, call: str, has_other: bool) -> None:
        """Raise an InvalidExperimentException naming both choices if ``has_other``."""
        if has_other:
            chosen_by = "configure_apex_amp()" if self._has_levels else self._chosen_by
            before = self.whole_models.name if self.whole_models != FLOAT32 else chosen_by
            raise errors.InvalidExperimentException(
                f"{call} asks for a precision, and so does {before}. Choose either torch.amp, apex levels or the "
                "precision of pl.Trainer, once, and leave the other out; for several models pass lists."
            )

    # apex

    def configure_apex_amp(
        self, models: Any, optimizers: Any, opt_level: str | None, verbosity: int | None, overrides: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Configure a level with its properties overridden; see the method of the context."""
        if self._loading_only:
            return models, optimizers
        scales = self.scaler is not None and (self._autocasts or self.scaler.is_enabled())
        has_other = self.whole_models != FLOAT32 or self._has_levels or scales
        self._refuse_two_precisions("configure_apex_amp()", has_other)
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


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_warned: set[type] = set()

TensorCast = Callable[[torch.Tensor], torch.Tensor]


def halves_to_float(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in HALF_TYPES else tensor


def make_cast(dtype: torch.dtype) -> TensorCast:
    """Return a function that casts floating-point tensors to ``dtype``."""
    return functools.partial(_cast_to, dtype)  # unlike a function in here, it can be pickled


def _cast_to(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_floats(value: Any, cast: TensorCast) -> Any:
    """Return ``value`` with all tensors, of any shapes, cast.

    Containers keep their types: lists, tuples, named tuples, sets, mutable mappings (Hugging Face's outputs, for
    example) and dataclasses, even frozen dataclasses; Lightning's ``apply_to_collection`` skips frozen dataclasses and
    sets. Tensors in objects of other types are not cast, with a warning.
    """
    if isinstance(value, torch.Tensor):
        return cast(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, cast) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(cast_floats(item, cast) for item in value)
    if isinstance(value, collections.abc.MutableMapping):
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = cast_floats(item, cast)
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                # Works even if the class is frozen.
                object.__setattr__(copied, field.name, cast_floats(getattr(value, field.name), cast))
        return copied
    if type(value) not in _warned:
        _warned.add(type(value))
        logger.warning(
            "A model in mixed precision takes or returns a %s; the tensors inside are not cast.", type(value).__name__
        )
    return value


@dataclasses.dataclass(eq=False)
class CastingForward:
    """The forward pass of a model between casts; set as the model's ``forward``.

    It is an object, not a closure, so that a deep copy of the model runs the copy's forward pass.
    """

    forward: Callable[..., Any]
    inputs: TensorCast | None = None
    outputs: TensorCast | None = None
    autocast: tuple[str, torch.dtype] | None = None  # the device type, and the type of safe operations

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.forward, updated=())  # other libraries read the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inputs is not None:
            args = cast_floats(args, self.inputs)
            kwargs = cast_floats(kwargs, self.inputs)
        with contextlib.nullcontext() if self.autocast is None else torch.autocast(*self.autocast):
            output = self.forward(*args, **kwargs)
        return output if self.outputs is None else cast_floats(output, self.outputs)


@dataclasses.dataclass(frozen=True)
class WholeModelPrecision:
    """The precision of every wrapped model if the trial chooses no precision.

    ``name`` is for messages, for example ``"pl.Trainer(precision='bf16-mixed')"``. With ``casts_weights``, weights are
    cast to ``dtype``; otherwise models compute in ``dtype`` under autocast. Autocast to float16 needs loss scaling:
    ``scales``, with the settings of ``scaler`` or torch's defaults. float32 changes nothing.
    """

    name: str
    dtype: torch.dtype
    casts_weights: bool = False
    scales: bool = False
    scaler: torch.amp.GradScaler | None = dataclasses.field(default=None, compare=False)

    def batch_cast(self) -> Callable[[Any], Any] | None:
        """Return a function that casts the floats of a batch, or None if batches stay as they are.

        In double precision losses and targets must be doubles too. In half precision losses are computed in float32.
        """
        return functools.partial(cast_floats, cast=make_cast(self.dtype)) if self.dtype is torch.float64 else None

    def cast(self, model: torch.nn.Module) -> None:
        """Cast the weights of ``model`` in place, if ``casts_weights``."""
        if self.casts_weights:
            model.to(self.dtype)

    def surround(self, model: torch.nn.Module, device: torch.device) -> None:
        """Make the forward pass of ``model`` compute in this precision, and return float32, or doubles."""
        if self.dtype is torch.float32:
            return
        inputs = make_cast(self.dtype) if self.casts_weights else None
        autocast = None if self.casts_weights else (device.type, self.dtype)
        model.forward = CastingForward(model.forward, inputs, halves_to_float, autocast)


FLOAT32 = WholeModelPrecision("float32", torch.float32)


def apply_level(
    level: Level, backend: Backend, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[torch.nn.Module, torch.nn.Module], dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """Cast models, inputs and outputs.

    Return for each model the replacement to train, and the float32 master of each parameter in half precision.
    """
    changed = models
    halves: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    if level.weights_type is not None:
        casting = WeightCast(level.weights_type, bool(level.keep_batchnorm_fp32))
        changed = [backend.placement.cast_weights(model, casting) for model in models]
        halves = casting.halves
    masters = {}
    if level.master_weights:
        masters = {half: master for master, half in halves.items()}
        for model in changed:
            _keep_masters(model, masters)
    elif halves:
        for optimizer in optimizers:
            backend.placement.replace_parameters(optimizer, halves)
    for model in changed:
        _surround(model, level, backend.device)
    return dict(zip(models, changed, strict=True)), masters


def _keep_masters(model: torch.nn.Module, masters: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Make ``model`` return a float32 state with the values of the masters, so that a checkpoint loses nothing.

    Loading a state of any precision sets masters and weights. ``masters`` maps parameters in half precision to float32
    parameters of the same shapes.
    """

    def in_float32(module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, tensor in named_tensors(module):
            if prefix + name in state and tensor.is_floating_point():
                state[prefix + name] = masters.get(tensor, tensor).detach().float()  # type: ignore[call-overload]

    def set_masters(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, tensor in named_tensors(module):
            saved = state.get(prefix + name)
            master = masters.get(tensor)  # type: ignore[call-overload]
            if master is not None and saved is not None and saved.shape == master.shape:
                master.detach().copy_(saved)

    model.register_state_dict_post_hook(in_float32)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(set_masters)  # type: ignore[no-untyped-call]


def _surround(model: torch.nn.Module, level: Level, device: torch.device) -> None:
    inputs = None if level.weights_type is None else make_cast(level.weights_type)
    outputs: TensorCast | None = halves_to_float if level.uses_half_precision else None
    if level.cast_model_outputs is not None:
        outputs = make_cast(level.cast_model_outputs)
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    autocast = (device.type, half) if level.patch_torch_functions else None
    if inputs or outputs or autocast:
        model.forward = CastingForward(model.forward, inputs, outputs, autocast)
