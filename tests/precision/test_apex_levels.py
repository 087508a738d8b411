"""The levels of configure_apex_amp on the CPU, against a plain loop that follows apex's documentation."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.precision.apex_levels import ApexLevels

BATCHES = [
    (torch.randn(8, 4, generator=torch.Generator().manual_seed(n)), torch.full((8, 1), n / 10)) for n in range(14)
]
#: The batches whose loss is made infinite.
OVERFLOWS = (0, 1, 6)


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def squares(outputs: torch.Tensor, targets: torch.Tensor, index: int) -> torch.Tensor:
    assert outputs.dtype is torch.float32
    return ((outputs - targets) ** 2).mean() * (float("inf") if index in OVERFLOWS else 1.0)


# What NVIDIA documents of apex.amp, as a plain PyTorch loop


@dataclasses.dataclass
class PlainScaler:
    """A loss scale that an overflow halves, and ``window`` passes without one double."""

    scale: float
    dynamic: bool
    window: int
    min_loss_scale: float = 0.0
    max_loss_scale: float = 2.0**24
    unskipped: int = 0

    def update(self, overflow: bool) -> bool:
        """Return whether to skip the step."""
        if overflow and self.dynamic:
            self.scale = max(self.min_loss_scale, self.scale / 2)
            self.unskipped = 0
            return True
        self.unskipped += 1
        if self.dynamic and self.unskipped == self.window:
            self.scale = min(self.max_loss_scale, self.scale * 2)
            self.unskipped = 0
        return False


class PlainLoop:
    """One model and one optimizer, trained as apex documents its levels, with bfloat16 for half precision.

    Attributes:
        scales, skipped: the scale after each batch, and which batches were skipped.
    """

    def __init__(
        self,
        level: str,
        model: torch.nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        scale: float | None,
        **rules: Any,
    ) -> None:
        self.level, self.model = level, model
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        if level in ("O2", "O3"):
            for module in model.modules():
                if level == "O3" or not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                        if tensor.is_floating_point():
                            tensor.data = tensor.data.bfloat16()
        self.optimizer = make_optimizer(self.masters if level == "O2" else list(model.parameters()))
        dynamic = scale is None and level in ("O1", "O2")
        self.scaler = PlainScaler(2.0**16 if dynamic else scale or 1.0, dynamic, **rules)
        self.scales: list[float] = []
        self.skipped: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.level == "O1":
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(inputs).float()
        return self.model(inputs.bfloat16() if self.level in ("O2", "O3") else inputs).float()

    def train(self, batches: list[Any], loss_of: Callable[[torch.Tensor, Any, int], torch.Tensor], clip: float) -> None:
        for index, (inputs, targets) in enumerate(batches):
            scale = self.scaler.scale
            (loss_of(self.forward(inputs), targets, index) * scale).backward()
            parameters = list(self.model.parameters())
            updated = self.masters if self.level == "O2" else parameters
            for parameter, target in zip(parameters, updated, strict=True):
                gradient = parameter.grad
                parameter.grad = None
                # What the optimizer sees is unscaled, in the precision of what it updates.
                target.grad = gradient.to(target.dtype) * (1 / scale)
            overflow = not all(bool(p.grad.isfinite().all()) for p in updated)
            if self.scaler.update(overflow):
                self.skipped.append(index)
            else:
                if clip:
                    torch.nn.utils.clip_grad_norm_(updated, clip)
                self.optimizer.step()
            self.optimizer.zero_grad()
            if self.level == "O2":
                with torch.no_grad():
                    for half, master in zip(parameters, updated, strict=True):
                        half.copy_(master)
            self.scales.append(self.scaler.scale)


# The levels beside it


def wrapped(
    model: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer] = adam
) -> tuple[pytorch.PyTorchTrialContext, Any, torch.optim.Optimizer]:
    """Return a context, and a model and an optimizer that are wrapped."""
    context = pytorch.PyTorchTrialContext()
    model = context.wrap_model(model)
    return context, model, context.wrap_optimizer(make_optimizer(model.parameters()))


@contextlib.contextmanager
def batch_of(context: pytorch.PyTorchTrialContext, index: int) -> Iterator[None]:
    """What the training does around each batch."""
    context.position.batch_idx = index
    context.precision.scaling.begin_batch(context.is_update_batch())
    yield
    context.precision.scaling.end_batch()


class Configured:
    """A model and an optimizer in a context, as a trial has them."""

    def __init__(
        self,
        level: str,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
        window: int | None = None,
        model: torch.nn.Module | None = None,
        **overrides: Any,
    ) -> None:
        self.context, model, optimizer = wrapped(model or network(), make_optimizer)
        self.model, self.optimizer = self.context.configure_apex_amp(model, optimizer, opt_level=level, **overrides)
        if window is not None:
            masters = zip(self.model.parameters(), self.parameters(), strict=True)
            own = {half: master for half, master in masters if half is not master}
            parts = (self.levels.level, self.context.backend, self.context.optimizers, own)
            self.context.precision.use_scaling(ApexLevels(*parts, growth_interval=window))

    @property
    def levels(self) -> ApexLevels:
        assert isinstance(self.context.precision.scaling, ApexLevels)
        return self.context.precision.scaling

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def train(self, batches: list[Any], clip: float = 0.0, loss_of: Callable[..., Any] = squares) -> list[float]:
        scales = []
        clips = (lambda p: torch.nn.utils.clip_grad_norm_(p, clip)) if clip else None
        for index, (inputs, targets) in enumerate(batches):
            with batch_of(self.context, index):
                self.context.backward(loss_of(self.model(inputs), targets, index))
                self.context.step_optimizer(self.optimizer, clip_grads=clips)
            scales.append(self.levels.state_dict()["amp_state"]["loss_scaler0"]["loss_scale"])
        return scales


@pytest.mark.parametrize("make_optimizer", [pytest.param(adam, marks=pytest.mark.slow), momentum])
@pytest.mark.parametrize(
    ("level", "scale", "rules"),
    [
        ("O1", None, {}),
        ("O1", 128.0, {}),
        ("O2", None, {}),
        ("O2", None, {"min_loss_scale": 2.0**15, "max_loss_scale": 2.0**16}),
        ("O2", 128.0, {}),
        ("O3", None, {}),
        ("O0", None, {}),
    ],
)
def test_levels_train_as_documented(
    level: str, scale: float | None, rules: dict[str, Any], make_optimizer: Any
) -> None:
    overflows = scale is None and level in ("O1", "O2")
    loss_of = squares if overflows else lambda outputs, targets, index: squares(outputs, targets, index=-1)
    plain = PlainLoop(level, network(), make_optimizer, scale, window=3, **rules)
    plain.train(BATCHES, loss_of, clip=0.1)
    ours = Configured(level, make_optimizer, window=3, loss_scale=scale, **rules)
    scales = ours.train(BATCHES, clip=0.1, loss_of=loss_of)
    assert scales == plain.scales
    assert len(plain.skipped) == (len(OVERFLOWS) if overflows else 0)
    weights = plain.masters if level == "O2" else list(plain.model.parameters())
    torch.testing.assert_close(ours.parameters(), weights, rtol=0, atol=0)
    torch.testing.assert_close([*ours.model.parameters()], [*plain.model.parameters()], rtol=0, atol=0)


def test_o2_keeps_float32() -> None:
    ours = Configured("O2")
    of_weights = {name: p.dtype for name, p in ours.model.named_parameters()}
    assert of_weights["0.weight"] is of_weights["3.weight"] is torch.bfloat16
    assert of_weights["1.weight"] is ours.model[1].running_mean.dtype is torch.float32
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    without = Configured("O2", keep_batchnorm_fp32="False")
    assert {p.dtype for p in without.model.parameters()} == {torch.bfloat16}


def test_optimizer_states_are_kept() -> None:
    _, model, optimizer = wrapped(network())
    model(BATCHES[0][0]).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    for level, dtype in (("O2", torch.float32), ("O3", torch.bfloat16)):
        halved = copy.deepcopy((model, optimizer))
        context = pytorch.PyTorchTrialContext()
        context.configure_apex_amp(context.wrap_model(halved[0]), context.wrap_optimizer(halved[1]), opt_level=level)
        for index, values in halved[1].state_dict()["state"].items():
            assert values["exp_avg"].dtype is dtype
            assert torch.equal(values["exp_avg"], before[index]["exp_avg"].to(dtype))
            assert torch.equal(values["step"], before[index]["step"])


@pytest.mark.parametrize(("given", "dtype"), [(None, torch.float32), (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_outputs_are_cast(level: str, given: torch.dtype | None, dtype: torch.dtype) -> None:
    assert Configured(level, cast_model_outputs=given).model(BATCHES[0][0]).dtype is dtype


class TwoLosses:
    """A model with an optimizer each, and as many scalers."""

    def __init__(self, num_losses: int = 2, frequency: int = 1) -> None:
        self.context = pytorch.PyTorchTrialContext(aggregation_frequency=frequency)
        models = [self.context.wrap_model(network()) for _ in range(2)]
        optimizers = [self.context.wrap_optimizer(adam(model.parameters())) for model in models]
        self.models, self.optimizers = self.context.configure_apex_amp(
            models, optimizers, opt_level="O1", num_losses=num_losses
        )
        self.batch = -1

    def train(self, factors: tuple[float, ...]) -> None:
        self.batch += 1
        inputs, targets = BATCHES[self.batch]
        with batch_of(self.context, self.batch):
            for index, factor in enumerate(factors):
                loss = ((self.models[index % 2](inputs) - targets) ** 2).mean() * factor
                self.context.backward(loss, retain_graph=True)
            for optimizer in self.optimizers:
                self.context.step_optimizer(optimizer)

    def scales(self) -> list[float]:
        entries = self.context.precision.scaling.state_dict()["amp_state"]
        return [entry["loss_scale"] / 2**16 for entry in entries.values()]

    def weights(self, index: int) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.models[index].parameters()])


def test_overflow_lowers_the_scale_of_its_loss_only() -> None:
    two = TwoLosses()
    first, second = two.weights(0), two.weights(1)
    two.train((1.0, float("inf")))
    assert two.scales() == [1, 0.5]
    assert not torch.equal(two.weights(0), first)
    assert torch.equal(two.weights(1), second)
    two.train((1.0, 1.0))
    assert two.scales() == [1, 0.5]
    assert not torch.equal(two.weights(1), second)
    assert two.weights(0).isfinite().all() and two.weights(1).isfinite().all()


def test_losses_with_own_scales_add_up() -> None:
    """Both reach the first model; what comes first is not scaled down once more by the second pass."""
    scaled, plain = TwoLosses(num_losses=3), network()
    scaled.train((1.0, float("nan"), 1.0))
    assert scaled.scales() == [1, 0.5, 1]
    inputs, targets = BATCHES[0]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = plain(inputs).float()
        ((outputs - targets) ** 2).mean().backward()
    adam(plain.parameters()).step()
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    torch.testing.assert_close(scaled.weights(0), expected, rtol=1e-3, atol=1e-4)


def test_one_scaler_serves_all_losses() -> None:
    two = TwoLosses(num_losses=1)
    two.train((1.0, float("inf"), 1.0, float("inf")))
    assert two.scales() == [0.25]


def test_more_losses_than_scalers_are_refused() -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"more than 2 losses.*num_losses=2"):
        TwoLosses().train((1.0, 1.0, 1.0))


def test_overflow_within_an_aggregation_skips_one_optimizer() -> None:
    two = TwoLosses(frequency=3)
    first, second = two.weights(0), two.weights(1)
    for factors in ((1.0, 1.0), (1.0, float("inf")), (1.0, 1.0)):
        assert torch.equal(two.weights(0), first)
        two.train(factors)
    assert not torch.equal(two.weights(0), first)
    assert torch.equal(two.weights(1), second)


def test_level_keeps_the_signature_of_forward() -> None:
    class Encoder(torch.nn.Linear):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(input_ids)

    context, model, optimizer = wrapped(Encoder(2, 2))
    before = inspect.signature(model.forward)
    model, _ = context.configure_apex_amp(model, optimizer, opt_level="O2")
    assert inspect.signature(model.forward) == before
    assert inspect.signature(copy.deepcopy(model).forward) == before


def test_copied_model_computes_with_its_own_weights() -> None:
    """A copy for an average of weights computes with its own ones."""
    model = Configured("O2").model
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(BATCHES[0][0]).any()
    assert model.eval()(BATCHES[0][0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_models_train_like_others(level: str, compiles: str) -> None:
    def compiled_if(moment: str, model: torch.nn.Module) -> Any:
        return torch.compile(model, backend="eager") if moment == compiles else model

    ours, plain = Configured(level, model=compiled_if("before", network())), Configured(level)
    ours.model = compiled_if("after", ours.model)
    assert ours.train(BATCHES[:3]) == plain.train(BATCHES[:3])
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
    saved = [value for name, value in ours.context.models[0].state_dict().items() if "weight" in name]
    assert {value.dtype for value in saved} == {torch.float32}
    torch._dynamo.reset()


class Recurrent(torch.nn.Module):
    """Weights that cuDNN wants in one piece, tied ones, and an input that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.lstm = torch.nn.LSTM(4, 4, batch_first=True)
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, reverse: bool = False) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens.flip(1) if reverse else tokens))
        outputs: torch.Tensor = self.head(hidden)
        return outputs


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_recurrent_and_tied_weights_train(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its LSTM in bfloat16 needs AVX-512
    torch.manual_seed(0)
    context, model, optimizer = wrapped(Recurrent())
    model, optimizer = context.configure_apex_amp(model, optimizer, opt_level=level)
    assert model.head.weight is model.embedding.weight
    tokens = torch.arange(12).reshape(2, 6) % 7
    losses = []
    for batch in range(40):
        with batch_of(context, batch):
            loss = torch.nn.functional.cross_entropy(model(tokens, reverse=False).flatten(0, 1), tokens.flatten())
            context.backward(loss)
            context.step_optimizer(optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_gradients_of_other_optimizers_are_unscaled() -> None:
    context = pytorch.PyTorchTrialContext()
    models: list[Any] = [context.wrap_model(torch.nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    context.configure_apex_amp(models[0], optimizers[0], opt_level="O2", loss_scale=1024.0)
    with batch_of(context, 0):
        context.backward(models[1](models[0](torch.ones(1, 2))).sum())
    assert torch.equal(models[1].bias.grad, torch.ones(2))


def test_bfloat16_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    Configured("O2").train(BATCHES[:3])
    (warning,) = [record.getMessage() for record in caplog.records if "bfloat16" in record.getMessage()]
    assert "opt_level='O2'" in warning
    caplog.clear()
    Configured("O0").train(BATCHES[:3])
    assert not caplog.records


@pytest.mark.parametrize("alone", [True, False])
def test_parts_come_back_as_given(alone: bool) -> None:
    context, model, optimizer = wrapped(network())
    given: tuple[Any, Any] = (model, optimizer) if alone else ([model], [optimizer])
    assert context.configure_apex_amp(*given, opt_level="O1") == given
    assert (context.models, context.optimizers) == ([model], [optimizer])
