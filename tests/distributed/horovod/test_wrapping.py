"""What Horovod makes of an optimizer, in a single process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from det_lightning import errors
from det_lightning.adapters.strategies.processes import TrainingProcesses
from det_lightning.distributed import processes
from det_lightning.distributed.backend import Backend, LocalBackend
from det_lightning.ranks.distributed_context import DistributedContext


@pytest.fixture
def backend(needs_horovod: None) -> Backend:
    from det_lightning.distributed.horovod import HorovodBackend

    return HorovodBackend(torch.device("cpu"))


def stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.optim.Optimizer:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_wrapped_optimizer_keeps_its_state(backend: Backend) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    plain = stepped(torch.optim.AdamW(model.parameters(), lr=0.5), model.weight)
    calls: list[Any] = []
    plain.register_step_post_hook(lambda *_: calls.append("step"))
    state = plain.state_dict()
    wrapped = backend.placement.wrap_optimizer(plain)
    assert wrapped.state_dict() == state
    assert wrapped.defaults["lr"] == 0.5
    model.weight.grad = torch.ones_like(model.weight)
    backend.gradients.step(wrapped, None)
    assert calls == ["step"]
    wrapped.load_state_dict(state)
    backend.gradients.step(wrapped, None)
    assert calls == ["step", "step"]
    wrapped.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    wrapped.zero_grad()
    assert model.weight.grad is None


def test_lightnings_optimizer_stands_in(backend: Backend) -> None:
    from pytorch_lightning.core.optimizer import LightningOptimizer

    model = torch.nn.Linear(2, 1)
    lightning: Any = LightningOptimizer(backend.placement.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5)))
    lightning.zero_grad()
    lightning.load_state_dict(lightning.state_dict())
    lightning.synchronize()
    with lightning.skip_synchronize():
        pass


def test_a_closure_is_refused(backend: Backend) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = backend.placement.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(errors.InvalidExperimentException, match="closure"):
        optimizer.step(lambda: 0.0)


def test_skipped_parameters_are_refused(backend: Backend) -> None:
    model = backend.placement.wrap_model(torch.nn.Linear(2, 1))
    optimizer = backend.placement.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(errors.InvalidExperimentException, match="weight belongs to two"):
        backend.placement.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(errors.InvalidExperimentException, match="got parameters after"):
        backend.gradients.synchronize(optimizer)


def test_bfloat16_needs_compression(backend: Backend) -> None:
    model = torch.nn.Linear(2, 1).bfloat16()
    with pytest.raises(errors.InvalidExperimentException, match="bfloat16"):
        backend.placement.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    backend.placement.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), fp16_compression=True)


def test_unbuildable_optimizer_is_refused(backend: Backend) -> None:
    class Stubborn(torch.optim.SGD):
        def __init__(self, params: Any, needed: int) -> None:
            super().__init__(params, lr=0.5)

    with pytest.raises(errors.InvalidExperimentException, match="Horovod cannot wrap a Stubborn"):
        backend.placement.wrap_optimizer(Stubborn(torch.nn.Linear(2, 1).parameters(), 1))


def test_one_process_of_horovod_trains_as_one(needs_horovod: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_HOROVOD", "1")
    assert isinstance(TrainingProcesses.from_script(DistributedContext(), "trial_ddp").backend, LocalBackend)
    with pytest.raises(ValueError, match="Horovod connects 1"):

        class Two(DistributedContext):
            def __init__(self) -> None:
                self.size = 2

        TrainingProcesses.from_script(Two(), "trial_ddp")


# What follows needs no Horovod.


def test_horovod_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(ImportError, match=r"\[horovod\].*build_horovod.sh"):
        TrainingProcesses.from_script(None, "horovod")


@pytest.mark.parametrize("other", ["USE_TORCH_DISTRIBUTED", "TORCHELASTIC_RUN_ID"])
def test_other_launchers_are_named(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    monkeypatch.setenv("USE_HOROVOD", "1")
    monkeypatch.setenv(other, "something")
    with pytest.raises(ValueError, match=f"{other}=something"):
        processes.connect_horovod()


@pytest.mark.parametrize("variable", ["USE_HOROVOD", "HOROVOD_RANK"])
def test_other_strategies_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    from pytorch_lightning.strategies import SingleDeviceStrategy

    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="trial_fsdp.*" + variable):
        TrainingProcesses.from_script(None, "trial_fsdp")
    with pytest.raises(ValueError, match="single_device.*" + variable):
        TrainingProcesses.from_trainer(SingleDeviceStrategy())
