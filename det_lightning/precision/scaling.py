"""Decides the scale of losses, and which optimizers skip a step after an overflow."""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from typing import Any

import torch

from det_lightning.distributed.backend import Backend, GradientExchange, list_parameters
from det_lightning.escaping import get_logger

logger = get_logger(__name__)


class LossScaling:
    """Scales losses between a context and a :class:`GradientExchange`; the base class only forwards to it."""

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self.exchanges = exchange.exchanges
        #: The gradient scaler of the trial, maybe unused here; None if there is none.
        self.scaler: Any = None
        #: The float32 parameters that optimizers update in place of the models' parameters.
        self.masters: list[torch.nn.Parameter] = []

    def begin_batch(self, communicate: bool) -> None:
        self._exchange.begin_batch(communicate)

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Run ``loss.backward`` on the scaled loss."""
        self._exchange.backward(loss, gradient, retain_graph, create_graph)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        self._exchange.synchronize(optimizer)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the scaling of the gradients of ``optimizer``, before gradients are clipped or read."""

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        """Run one step of ``optimizer``, through ``scaler`` if given, unless scaled gradients overflowed."""
        self._exchange.step(optimizer, scaler)

    def end_batch(self) -> None:
        """End a training batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries for ``state_dict.pth`` besides the state of ``context.scaler``, by key."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the entries of :meth:`state_dict` from the content of a ``state_dict.pth``; warn of unused entries."""
        if "amp_state" in state:
            logger.warning("The checkpoint has the state of apex's loss scalers, which the trial does not configure.")

    def collect_partial(self) -> dict[str, Any]:
        """Return the state of an unfinished aggregation besides the gradients of the models' parameters."""
        return {}

    def load_partial(self, saved: dict[str, Any]) -> None:
        """Load the result of :meth:`collect_partial`, maybe an empty dict."""


class TorchAmp(LossScaling):
    """Scales each loss and steps through one scaler, updated once per batch if any optimizer has stepped."""

    def __init__(self, scaler: Any, exchange: GradientExchange) -> None:
        super().__init__(exchange)
        self._scaler = scaler
        self._stepped = False

    def backward(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        super().backward(self._scaler.scale(loss), gradient, retain_graph, create_graph)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any | None) -> None:
        super().step(optimizer, self._scaler if scaler is None else scaler)
        self._stepped |= scaler is None or scaler is self._scaler

    def end_batch(self) -> None:
        if self._stepped:
            self._stepped = False
            self._scaler.update()


def make_scaler(like: torch.amp.GradScaler | None = None, device: str = "cuda") -> torch.amp.GradScaler:
    """Return a scaler with the settings of ``like``, or torch's defaults; disabled without a GPU."""
    settings: dict[str, Any] = {}
    if like is not None and like.is_enabled():
        settings = {
            "init_scale": like.get_scale(),
            "growth_factor": like.get_growth_factor(),
            "backoff_factor": like.get_backoff_factor(),
            "growth_interval": like.get_growth_interval(),
        }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available.*")
        return torch.amp.GradScaler(device, **settings)


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class ScaledGradients:
    """Unscales the new gradients of each backward pass, so that passes with different scales can add up.

    ``masters`` maps parameters in half precision to the float32 parameters in the optimizers.
    """

    def __init__(
        self,
        backend: Backend,
        optimizers: list[torch.optim.Optimizer],
        masters: dict[torch.nn.Parameter, torch.nn.Parameter],
    ) -> None:
        self._exchange = backend.gradients
        self._states = backend.states
        self._optimizers = optimizers
        self._pairs = list(masters.items())
        self._pairs_of: dict[torch.optim.Optimizer, _Pairs] = {}
        for optimizer in optimizers:
            own = set(list_parameters(optimizer))
            self._pairs_of[optimizer] = [(half, master) for half, master in self._pairs if master in own]
        self._parameters: list[torch.nn.Parameter] = []
        self._earlier: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def begin_pass(self) -> None:
        """Set earlier gradients aside."""
        # Collected at each pass, because parameters may be added to an optimizer.
        parameters = [parameter for optimizer in self._optimizers for parameter in list_parameters(optimizer)]
        self._parameters = parameters if len(self._optimizers) == 1 else list(dict.fromkeys(parameters))
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None

    @torch.no_grad()
    def end_pass(self, inverse: torch.Tensor) -> tuple[list[torch.optim.Optimizer], torch.Tensor]:
        """All-reduce and unscale the new gradients, and add the earlier ones back.

        Return the optimizers with new gradients, and a tensor of shape ``()``, not 0 if a gradient on any rank is not
        finite.
        """
        self._take_from_halves()
        touched = [o for o in self._optimizers if any(p.grad is not None for p in list_parameters(o))]
        for optimizer in touched:
            self._exchange.synchronize(optimizer)
        overflow = self._unscale(inverse)
        self._exchange.agree(overflow)
        for parameter, gradient in self._earlier:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._earlier.clear()
        return touched, overflow

    def copy_to_halves(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the masters updated by ``optimizer`` into the weights of the models."""
        if self._pairs_of[optimizer]:
            with torch.no_grad():
                _copy(self._pairs_of[optimizer])

    def collect_masters(self) -> list[torch.Tensor | None]:
        """Return the whole gradient of each master; see ``ModelStates.is_sharded``."""
        present = {index: master.grad for index, (_, master) in enumerate(self._pairs) if master.grad is not None}
        whole = self._states.gather(present)
        return [whole.get(index) for index in range(len(self._pairs))]

    def load_masters(self, saved: list[torch.Tensor | None]) -> None:
        """Restore the result of :meth:`collect_masters`; other masters get no gradients."""
        for (_, master), gradient in itertools.zip_longest(self._pairs, saved[: len(self._pairs)]):
            master.grad = None if gradient is None else self._states.place_like(master, gradient)

    def _take_from_halves(self) -> None:
        """Move the gradients of weights in half precision to their masters."""
        pairs = [(half, master) for half, master in self._pairs if half.grad is not None]
        self._exchange.average_rest(half for half, _ in pairs)
        dense: _Pairs = []
        for half, master in pairs:
            gradient: Any = half.grad
            if gradient.layout is torch.strided:
                master.grad = torch.empty_like(master)
                dense.append((master.grad, gradient))
            else:
                master.grad = gradient.to(master.dtype)
            half.grad = None
        if dense:
            _copy(dense)

    def _unscale(self, inverse: torch.Tensor) -> torch.Tensor:
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in self._parameters:
            if parameter.grad is not None:
                values = _values_of_gradient(parameter)
                by_kind[values.device, values.dtype].append(values)
        overflow = torch.zeros((), dtype=torch.float32, device=inverse.device)
        for (device, _), gradients in by_kind.items():
            found = overflow if device == overflow.device else torch.zeros((), dtype=torch.float32, device=device)
            factor = inverse.to(device, non_blocking=True)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, factor)
            if found is not overflow:
                overflow += found.to(overflow.device, non_blocking=True)
        return overflow


def _copy(pairs: _Pairs) -> None:
    """Copy the second tensor of each pair into the first, in few kernels, rounding to its type."""
    torch._foreach_copy_([_local(to) for to, _ in pairs], [_local(of) for _, of in pairs])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is on this rank."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    # Slow to import, but imported already if parameters are sharded.
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _values_of_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the tensor that holds the values of a gradient on this rank."""
    assert parameter.grad is not None
    gradient = _local(parameter.grad)
    if gradient.is_sparse:
        # Values at the same index must be summed before they are checked.
        parameter.grad = summed = gradient.coalesce()
        return summed.values()
    return gradient
