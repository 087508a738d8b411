"""Functions that trials of old releases import, and today's Determined does not have any more."""

from __future__ import annotations

import torch

from det_lightning import pytorch


def test_reset_parameters_draws_all_anew() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 1), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(2, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pytorch.reset_parameters(model)
    assert all((model.state_dict()[name] != value).all() for name, value in before.items())
