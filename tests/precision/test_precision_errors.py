"""Misuse of the calls for mixed precision: each error names what is wrong, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from tests.precision.test_apex_levels import batch_of

Context = pytorch.PyTorchTrialContext


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def configure(**arguments: Any) -> Callable[[Context], Any]:
    def call(context: Context) -> Any:
        model = context.wrap_model(torch.nn.Linear(2, 1))
        return context.configure_apex_amp(model, context.wrap_optimizer(sgd(model)), **arguments)

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"opt_level": "01"}, r"'O0', 'O1', 'O2' and 'O3', with the letter O; got '01'"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "maybe"}, "keep_batchnorm_fp32='maybe'.*'True', 'False' or None"),
        ({"loss_scale": "abc", "num_losses": -1}, "loss_scale='abc'.*a number above 0.*'dynamic'; and num_losses=-1"),
        ({"loss_scale": -1.0}, "loss_scale=-1.0"),
        ({"loss_scale": "inf"}, "loss_scale='inf'"),
        ({"num_losses": True}, "num_losses=True, which must be an int of at least 1"),
        ({"cast_model_outputs": "half"}, "cast_model_outputs='half', which must be a floating-point torch.dtype"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, "cast_model_type=torch.int8"),
        ({"cast_model_type": torch.float16}, "cast_model_type=torch.float16, but 'O1' leaves weights in float32"),
        ({"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True, but 'O1'"),
        ({"master_weights": True}, "master_weights=True, but 'O1'"),
        ({"opt_level": "O2", "master_weights": 1}, "master_weights=1, which must be True, False or None"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True goes with opt_level='O1'"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "got min_loss_scale=8.0, above max_loss_scale=4.0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidExperimentException, match=message):
        configure(**arguments)(Context())


@pytest.mark.parametrize(
    "arguments",
    [
        {"opt_level": "O1", "cast_model_type": False, "loss_scale": "128.0"},
        {"opt_level": "O1", "cast_model_type": torch.float32},
        {"opt_level": "O2", "keep_batchnorm_fp32": "True", "max_loss_scale": None, "num_losses": None},
        {"opt_level": "O0", "loss_scale": "dynamic"},
    ],
)
def test_arguments_of_apex_are_accepted(arguments: dict[str, Any]) -> None:
    configure(**arguments)(Context())


class Parts:
    """What can be passed to configure_apex_amp, well and badly."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(2, 1))
        self.other = context.wrap_model(torch.nn.Linear(2, 1))
        self.half = context.wrap_model(torch.nn.Linear(2, 1).half())
        self.optimizer = context.wrap_optimizer(sgd(self.model))
        self.of_other = context.wrap_optimizer(sgd(self.other))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda p: (p.model, p.of_other), r"optimizer 0 \(SGD\) has no parameters of the given models \(2 in all\)"),
        (lambda p: ([p.model], [p.optimizer, p.of_other]), r"optimizer 1 \(SGD\) has no parameters"),
        (lambda p: (torch.nn.Linear(2, 1), p.optimizer), r"model 0 \(Linear\) was not wrapped: .*wrap_model\(\)"),
        (lambda p: (p.model, sgd(p.model)), r"optimizer 0 \(SGD\) was not wrapped: .*wrap_optimizer\(\)"),
        (lambda p: ([p.model, p.half], p.optimizer), r"'weight' of model 1 .* torch.float16 already.*\.half\(\)"),
        (lambda p: ("model", p.optimizer), r"configure_apex_amp\(models=.*'model' of type str"),
        (lambda p: (p.model, [p.optimizer, None]), r"configure_apex_amp\(optimizers=.*None of type NoneType"),
        (lambda p: (p.half, p.of_other), "has no parameters.*is of type torch.float16"),
    ],
)
def test_models_and_optimizers_that_do_not_fit_are_refused(
    given: Callable[[Parts], tuple[Any, Any]], message: str
) -> None:
    parts = Parts(Context())
    with pytest.raises(errors.InvalidExperimentException, match=message):
        parts.context.configure_apex_amp(*given(parts), opt_level="O2")
    assert parts.model.weight.dtype is torch.float32


SCALER = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda c: c.wrap_scaler(SCALER), configure(), "Choose either torch.amp, apex levels"),
        (configure(), lambda c: c.experimental.use_amp(), "Choose either torch.amp, apex levels"),
        (configure(), lambda c: c.configure_apex_amp([], []), "so does configure_apex_amp"),
        (configure(), lambda c: c.wrap_model(torch.nn.Linear(1, 1)), r"wrap_model\(\) before configure_apex_amp\(\)"),
        (configure(), lambda c: c.wrap_optimizer(sgd(c.models[0])), r"wrap_optimizer\(\) before configure_apex_amp"),
        (
            configure(),
            lambda c: c.step_optimizer(c.optimizers[0], scaler=SCALER),
            r"step_optimizer\(scaler=...\) got a GradScaler after configure_apex_amp\(\)",
        ),
    ],
)
def test_calls_in_the_wrong_order_are_refused(
    first: Callable[[Context], Any], second: Callable[[Context], Any], message: str
) -> None:
    context = Context()
    context.position.batch_idx = 0
    first(context)
    with pytest.raises(errors.InvalidExperimentException, match=message):
        second(context)


def test_disabled_level_changes_nothing() -> None:
    context = Context()
    configure(opt_level="nonsense", enabled=False)(context)
    assert not context.precision.scales_losses
    assert context.precision.path is context.backend.gradients


# DET_LIGHTNING_AMP

STAND_IN = """
import contextlib
calls = []
def initialize(models, optimizers, **arguments):
    calls.append(arguments)
    return models, optimizers
@contextlib.contextmanager
def scale_loss(loss, optimizers, loss_id):
    calls.append(loss_id)
    yield loss * 4
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(4)
def state_dict():
    return {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}}
def load_state_dict(state):
    calls.append(state)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Makes a package ``apex``, with or without ``amp``, be the one that is installed."""

    def install(amp: str | None) -> None:
        package = tmp_path / "apex"
        package.mkdir()
        (package / "__init__.py").write_text("")
        if amp is not None:
            (package / "amp.py").write_text(amp)
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("apex", "apex.amp"):
            monkeypatch.delitem(__import__("sys").modules, name, raising=False)

    monkeypatch.setenv("DET_LIGHTNING_AMP", "apex")
    return install


def test_unknown_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_LIGHTNING_AMP", "nvidia")
    with pytest.raises(ValueError, match=r"DET_LIGHTNING_AMP must be 'torch' .* or 'apex'; got 'nvidia'"):
        configure()(Context())


@pytest.mark.parametrize("has_pypis", [True, False])
def test_apex_without_amp_is_refused(has_pypis: bool, installed: Callable[[str | None], None]) -> None:
    if has_pypis:
        installed(None)
    with pytest.raises(errors.InvalidExperimentException, match=r"imported: No module named 'apex.*unrelated.*Unset"):
        configure()(Context())


def test_an_installed_apex_is_used(installed: Callable[[str | None], None]) -> None:
    installed(STAND_IN)
    context = Context()
    model, optimizer = configure(opt_level="O2", loss_scale=4.0)(context)
    import apex.amp  # type: ignore[import-not-found]

    assert (apex.amp.calls[0]["opt_level"], apex.amp.calls[0]["num_losses"]) == ("O2", 1)
    before = model.weight.detach().clone()
    with batch_of(context, 0):
        context.backward(model(torch.ones(1, 2)).sum())
        context.step_optimizer(optimizer)
    torch.testing.assert_close(model.weight, before - 0.1)
    state = context.precision.scaling.state_dict()
    assert state == {"amp_state": apex.amp.state_dict()}
    context.precision.scaling.load_state_dict(state)
    assert apex.amp.calls[1:] == [0, state["amp_state"]]
