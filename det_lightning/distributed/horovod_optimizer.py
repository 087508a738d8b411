"""A Horovod optimizer that behaves like the original torch optimizer."""

from __future__ import annotations

from typing import Any

import torch

from det_lightning import errors


class HorovodOptimizer:
    """A Horovod optimizer made from a torch optimizer, and corrected where the two differ.

    Attributes:
        passes: number of backward passes that add to a gradient before an exchange.
    """

    def __init__(
        self,
        hvd: Any,
        optimizer: torch.optim.Optimizer,
        named: dict[str, torch.nn.Parameter],
        passes: int,
        compresses: bool,
    ) -> None:
        self._hvd = hvd
        self._named = named
        self._name = f"{next(iter(named), 'nothing')}.used"
        self.passes = passes
        self.parameters = list(named.values())
        for name, parameter in named.items():
            if parameter.dtype is torch.bfloat16 and not compresses:
                raise errors.InvalidExperimentException(
                    f"{name} is of type bfloat16, which Horovod cannot exchange. Train in float32 with "
                    "context.experimental.use_amp(), or call wrap_optimizer(..., fp16_compression=True)."
                )
        # Horovod would skip frozen parameters for good, and the ranks would diverge if these are trained later.
        frozen = [p for p in self.parameters if not p.requires_grad and p.is_floating_point()]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            self.optimizer: Any = hvd.DistributedOptimizer(
                optimizer,
                named_parameters=list(named.items()),
                backward_passes_per_step=passes,
                compression=hvd.Compression.fp16 if compresses else hvd.Compression.none,
            )
        except TypeError as e:
            raise errors.InvalidExperimentException(
                f"Horovod cannot wrap a {type(optimizer).__name__}: Horovod makes a new optimizer from the parameter "
                f"groups alone ({e}). Give the other arguments of __init__ default values."
            ) from e
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        # State, defaults and hooks would be lost. A scheduler may have replaced the step of the old optimizer.
        vars(self.optimizer).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self._replace_methods()

    def _replace_methods(self) -> None:
        """Correct methods of the class that Horovod creates for each optimizer."""
        wrapped = self.optimizer
        kind: Any = type(wrapped)
        # Hooks around a step would run twice: around Horovod's step, and around the inner step.
        step_of_horovod = getattr(kind.step, "__wrapped__", kind.step)

        def step(_: Any, closure: Any = None) -> Any:
            if closure is not None:
                raise errors.InvalidExperimentException(
                    f"{kind.__name__}.step() got a closure: no rank would get the gradients of other ranks. "
                    "Call context.backward() and context.step_optimizer()."
                )
            return step_of_horovod(wrapped)

        step.hooked = True  # type: ignore[attr-defined]
        kind.step = step
        zero_grad_of_torch = kind.__mro__[1].zero_grad

        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            self.finish()
            # Passes that were counted but not exchanged no longer count.
            self._handles.clear()
            wrapped.set_backward_passes_per_step(wrapped.backward_passes_per_step)
            zero_grad_of_torch(wrapped, set_to_none)

        kind.zero_grad = zero_grad
        # Lightning's optimizers derive from this class. Horovod's methods call super() of the class of self, so they
        # would call themselves endlessly, and set their flags on the wrong object.
        for name in ("load_state_dict", "synchronize", "skip_synchronize"):
            setattr(kind, name, getattr(wrapped, name))  # already bound to this object

    def is_exchanging(self) -> bool:
        """Return whether the exchange of some gradient is under way."""
        return any(handle is not None for handle, _ in self._handles.values())

    @property
    def _handles(self) -> Any:
        """The running exchanges of gradients, by parameter, for which Horovod has no public name."""
        return self.optimizer._handles

    def describe_passes(self) -> str:
        """Return the optimizer's class, first parameters, and allowed number of backward passes."""
        names = ", ".join(list(self._named)[:3]) + (", ..." if len(self._named) > 3 else "")
        # Horovod's class has the name of the original class.
        return f"{type(self.optimizer).__name__} of {names}, with backward_passes_per_step={self.passes}"

    def finish(self) -> None:
        if self.is_exchanging():
            self.synchronize()

    def synchronize(self) -> None:
        """Average all gradients; remove the gradients of parameters that no rank has used.

        Horovod fills in zeros, with which weight decay and momentum would still act.
        """
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != len(self.parameters):
            raise errors.InvalidExperimentException(
                f"The {type(self.optimizer).__name__} got parameters after wrap_optimizer(), unknown to Horovod. Add "
                "all parameters before wrap_optimizer(); freeze parameters that train later."
            )
        if self._hvd.size() == 1:
            return
        here = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int32)
        anywhere = self._hvd.allreduce_async(here, name=self._name, op=self._hvd.Sum)
        self.optimizer.synchronize()
        for parameter, ranks in zip(self.parameters, self._hvd.synchronize(anywhere).tolist(), strict=True):
            if ranks == 0:
                parameter.grad = None
