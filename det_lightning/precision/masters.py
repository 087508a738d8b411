"""The float32 masters that optimizers update in place of weights in half precision."""

from __future__ import annotations

from typing import Any

import torch

from det_lightning.distributed.weight_cast import named_tensors


def keep_masters(model: torch.nn.Module, masters: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    """Make the state of ``model`` one in float32, with the values of the masters: nothing is lost in a checkpoint.

    Loading such a state, or that of a model in any precision, sets masters and weights.

    Args:
        model: some of its parameters are in half precision.
        masters: the float32 parameter of each of those that has one.
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
                with torch.no_grad():
                    master.copy_(saved)

    model.register_state_dict_post_hook(in_float32)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(set_masters)  # type: ignore[no-untyped-call]
