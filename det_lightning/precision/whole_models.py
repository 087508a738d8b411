"""One precision for all models of a trial, chosen from outside of it."""

from __future__ import annotations

import dataclasses

import torch

from det_lightning.precision.casting import CastingForward, floats_of, halves_to_float


@dataclasses.dataclass(frozen=True)
class WholeModelPrecision:
    """The precision of every wrapped model where the trial does not choose one.

    Attributes:
        name: of the choice, for messages, such as ``"pl.Trainer(precision='bf16-mixed')"``.
        casts_weights: weights have the type ``dtype`` too; otherwise models compute in it under autocast.
        scales: scale losses, as float16 needs under autocast.
        scaler: one whose settings to use for that; by default torch's.
    """

    name: str
    dtype: torch.dtype
    casts_weights: bool = False
    scales: bool = False
    scaler: torch.amp.GradScaler | None = dataclasses.field(default=None, compare=False)

    def cast(self, model: torch.nn.Module) -> None:
        """Cast the weights of ``model`` in place, if that was chosen."""
        if self.casts_weights:
            model.to(self.dtype)

    def surround(self, model: torch.nn.Module, device: torch.device) -> None:
        """Make the forward pass of ``model`` compute in this precision, and return float32."""
        inputs = floats_of(self.dtype) if self.casts_weights else None
        autocast = None if self.casts_weights else (device.type, self.dtype)
        model.forward = CastingForward(model.forward, inputs, halves_to_float, autocast)
