"""Reading and restoring the gradients of models that hold a submodule named ``module``."""

from __future__ import annotations

import pytest
import torch

from det_lightning.distributed.backend import ModelStates


class Wrapper(torch.nn.Module):
    """A model with parameters of one name, inside of ``module`` and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(inputs)
        return outputs + self.weight.sum()


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def trained() -> Wrapper:
    model = Wrapper()
    model(torch.ones(1, 2)).sum().backward()
    return model


def test_equal_names_keep_gradients() -> None:
    model = trained()
    expected = gradients_of(model)
    saved = ModelStates().gradients(model)
    model.zero_grad()
    ModelStates().load_gradients(model, saved)
    torch.testing.assert_close(gradients_of(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("has_gradient", ["weight", "module.weight"])
def test_equal_names_share_no_gradient(has_gradient: str) -> None:
    model = trained()
    saved = {has_gradient: ModelStates().gradients(model)[has_gradient]}
    ModelStates().load_gradients(model, saved)
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == [has_gradient]


@pytest.mark.parametrize("saved_name", ["module.weight", "weight"])
def test_gradients_load_with_any_prefix(saved_name: str) -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 1)})
    ModelStates().load_gradients(model, {saved_name: torch.full((1, 2), 3.0)})
    torch.testing.assert_close(gradients_of(model), [torch.full((1, 2), 3.0), None])
