"""Mixed precision over whole runs: under either Trainer, over checkpoints, in any nesting of outputs."""

from __future__ import annotations

import collections
import copy
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import CheckpointStorage, load_checkpoint
from det_lightning.precision.choice import WholeModelPrecision, cast_floats, halves_to_float
from det_lightning.precision.scaling import TorchAmp, make_scaler
from tests.lightning import pl, trainer
from tests.precision.test_apex_levels import batch_of
from tests.trials import SmallTrial, fit_trial, seed_everything, weights_of


class Leveled(SmallTrial):
    """The small trial under one of apex's levels, with losses that overflow now and then."""

    level: ClassVar[dict[str, Any]] = {"opt_level": "O2"}
    overflows: tuple[int, ...] = (1, 4)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        (self.body, self.head), (self.adam, self.sgd) = context.configure_apex_amp(
            [self.body, self.head], [self.adam, self.sgd], **self.level
        )
        self.losses: list[float] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.context.backward(loss * (float("inf") if batch_idx in self.overflows else 1.0))
        self.context.step_optimizer(self.sgd, clip_grads=lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0))
        self.context.step_optimizer(self.adam)
        return {"loss": loss}


class LeveledO1(Leveled):
    level: ClassVar[dict[str, Any]] = {"opt_level": "O1", "num_losses": 2}


class LeveledO3(Leveled):
    level: ClassVar[dict[str, Any]] = {"opt_level": "O3", "loss_scale": "dynamic"}


def fit(kind: type[Any], storage: Path, batches: int, aggregation: int = 1, **arguments: Any) -> Any:
    seed_everything()
    lengths = {"max_length": pytorch.Batch(batches), "reporting_period": pytorch.Batch(3)}
    return fit_trial(kind, aggregation_frequency=aggregation, checkpoint_storage=storage, **lengths, **arguments)


def train_under(
    precision: Any, kind: type[Any] = SmallTrial, batches: int = 6, path: Path | None = None
) -> tuple[TrialModule, pl.Trainer]:
    seed_everything()
    module = TrialModule(kind, max_length=pytorch.Batch(batches), reporting_period=pytorch.Batch(2))
    made = trainer(precision=precision)
    made.fit(module, ckpt_path=path)
    return module, made


@pytest.mark.parametrize(("kind", "aggregation"), [(Leveled, 1), (Leveled, 3), (LeveledO1, 3), (LeveledO3, 1)])
def test_resumed_runs_end_bit_equal(tmp_path: Path, kind: type[Leveled], aggregation: int) -> None:
    """Scale, growth counter and float32 masters go on."""
    straight = fit(kind, tmp_path / "straight", 10, aggregation)
    fit(kind, tmp_path / "two", 5, aggregation)
    resumed = fit(kind, tmp_path / "two", 10, aggregation, latest_checkpoint="last")
    assert resumed.losses == straight.losses[5:]
    assert torch.equal(weights_of(resumed), weights_of(straight))
    assert resumed.context.precision.scaling.state_dict() == straight.context.precision.scaling.state_dict()


def test_the_state_is_in_apexs_own_form(tmp_path: Path) -> None:
    fit(LeveledO1, tmp_path, 6)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    state = load_checkpoint(tmp_path / checkpoint).state
    # Batches 1 and 4 overflowed, so one pass was clean since; there was never a second loss.
    expected = {"loss_scale": 2.0**14, "unskipped": 1}
    assert state["amp_state"] == {"loss_scaler0": expected, "loss_scaler1": {"loss_scale": 2.0**16, "unskipped": 0}}


def test_o2_saves_float32(tmp_path: Path) -> None:
    """So that a plain trial loads it, and nothing of the masters is lost."""
    trained = fit(Leveled, tmp_path, 6)
    (checkpoint,) = CheckpointStorage(tmp_path).list_ids()
    weights = load_checkpoint(tmp_path / checkpoint).state["models_state_dict"]
    optimizers = (trained.adam, trained.sgd)
    masters = [p.detach() for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    saved = [value for of_model in weights for value in of_model.values()]
    assert {value.dtype for value in saved} == {torch.float32}
    torch.testing.assert_close(saved, masters, rtol=0, atol=0)
    plain = fit(SmallTrial, tmp_path / "plain", 6, latest_checkpoint=tmp_path / checkpoint)
    assert torch.equal(weights_of(plain), torch.cat([master.flatten() for master in masters]))


def test_an_old_state_of_apex_goes_on() -> None:
    context = pytorch.PyTorchTrialContext()
    Leveled(context)
    old = {"amp_state": collections.OrderedDict(loss_scaler0={"loss_scale": 512.0, "unskipped": 1999})}
    context.precision.scaling.load_state_dict(old)
    assert context.precision.scaling.state_dict() == {"amp_state": dict(old["amp_state"])}


@pytest.mark.slow
def test_states_of_other_precisions_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for earlier, later, message in (
        (SmallTrial, Leveled, "no 'amp_state'"),
        (Leveled, LeveledO1, "states of 1 loss scalers, and configure_apex_amp(num_losses=2)"),
        (Leveled, SmallTrial, "state of apex's loss scalers, which the trial does not configure"),
    ):
        caplog.clear()
        storage = tmp_path / f"{earlier.__name__}-{later.__name__}"
        fit(earlier, storage, 2)
        fit(later, storage, 3, latest_checkpoint="last")
        assert any(message in record.getMessage() for record in caplog.records), message


def test_lightnings_checkpoints_hold_scales(tmp_path: Path) -> None:
    def train(batches: int, path: Path | None = None) -> Any:
        module, made = train_under("32-true", Leveled, batches, path)
        made.save_checkpoint(tmp_path / f"{batches}.ckpt")
        return module.trial

    straight = train(8)
    train(3)
    resumed = train(8, tmp_path / "3.ckpt")
    assert resumed.losses == straight.losses[3:]
    assert resumed.context.precision.scaling.state_dict() == straight.context.precision.scaling.state_dict()


# torch.amp


class Scaled(SmallTrial):
    """A scaler of its own, on the CPU, whose state changes with every batch."""

    make_scaler = staticmethod(lambda: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.scaler = context.wrap_scaler(self.make_scaler())
        super().__init__(context)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.context.backward(self.scaler.scale(loss))
        for optimizer in (self.sgd, self.adam):
            self.scaler.unscale_(optimizer)
            clip = lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0)  # noqa: E731
            self.context.step_optimizer(optimizer, clip_grads=clip, scaler=self.scaler)
        self.scaler.update()
        return {"loss": loss}


class ScaledByTheOldClass(Scaled):
    make_scaler = staticmethod(lambda: torch.cuda.amp.GradScaler(enabled=False))


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.GradScaler.*:FutureWarning")
@pytest.mark.parametrize("kind", [Scaled, ScaledByTheOldClass])
def test_wrapped_scalers_resume(tmp_path: Path, kind: type[Scaled]) -> None:
    straight = fit(kind, tmp_path / "straight", 7)
    if kind is Scaled:
        assert straight.scaler.get_scale() == 64.0
    fit(kind, tmp_path / "two", 3)
    resumed = fit(kind, tmp_path / "two", 7, latest_checkpoint="last")
    assert torch.equal(weights_of(resumed), weights_of(straight))
    assert resumed.scaler.state_dict() == straight.scaler.state_dict()


def amp_context(scaler: Any, aggregation: int = 1) -> tuple[pytorch.PyTorchTrialContext, Any, list[Any]]:
    """Return a context as ``use_amp`` leaves it on a GPU, but on the CPU; a model; and two optimizers."""
    context = pytorch.PyTorchTrialContext(aggregation_frequency=aggregation)
    context.precision.scaler = scaler
    context.precision.use_scaling(TorchAmp(scaler, context.backend.gradients))
    torch.manual_seed(0)
    model: Any = context.wrap_model(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
    adam = context.wrap_optimizer(torch.optim.Adam(model[0].parameters(), lr=0.1))
    adagrad = context.wrap_optimizer(torch.optim.Adagrad(model[1].parameters(), lr=0.1))
    return context, model, [adam, adagrad]


def test_use_amp_updates_the_scaler_once_a_batch() -> None:
    """Beside a loop that follows torch's documentation, with one batch that overflows and clipping."""
    ours, by_hand = make_scaler(device="cpu"), torch.amp.GradScaler("cpu")
    context, model, optimizers = amp_context(ours, aggregation=2)
    _, plain, references = amp_context(by_hand)
    for batch, inputs in enumerate(torch.randn(8, 4, 2)):
        factor = float("inf") if batch == 3 else 1.0
        with batch_of(context, batch):
            context.backward(model(inputs).square().mean() * factor)
            for optimizer in optimizers:
                context.step_optimizer(optimizer, clip_grads=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1))
        by_hand.scale(plain(inputs).square().mean() * factor).backward()
        if batch % 2 == 1:
            for reference in references:
                by_hand.unscale_(reference)
                parameters = [p for group in reference.param_groups for p in group["params"]]
                for parameter in parameters:
                    parameter.grad.div_(2)
                torch.nn.utils.clip_grad_norm_(parameters, 0.1)
                by_hand.step(reference)
                reference.zero_grad()
            by_hand.update()
        assert ours.state_dict() == by_hand.state_dict()
        torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=0, atol=0)
    assert ours.get_scale() == 2.0**15
    # No step, no update: torch would raise.
    context.precision.scaling.begin_batch(context.is_update_batch())
    context.precision.scaling.end_batch()


def test_scaler_settings_are_copied() -> None:
    """As when ``pl.Trainer`` got a precision plugin with a scaler of its own."""
    other = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    assert make_scaler(other, "cpu").state_dict() == other.state_dict()


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = "kept"


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """A mapping and a dataclass in one, as those of Hugging Face are."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                collections.OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nested_halves_become_float32(dtype: torch.dtype) -> None:
    half, number = torch.ones(2, dtype=dtype), torch.tensor(3)
    nested: dict[str, Any] = {
        "list": [half, (number, None)],
        "pair": Pair(half, "text"),
        "default": collections.defaultdict(list, {"key": half}),
        "frozen": Frozen(half, (half, half)),
        "output": ModelOutput(logits=half),
    }
    before = copy.deepcopy(nested)
    done = cast_floats(nested, halves_to_float)
    cast = [done["list"][0], done["pair"].first, done["default"]["key"], done["output"]["logits"]]
    cast += [done["frozen"].logits, done["frozen"].hidden[1], done["output"].logits]
    assert {tensor.dtype for tensor in cast} == {torch.float32}
    assert done["list"][1] == (number, None)
    assert [type(done[key]) for key in done] == [type(nested[key]) for key in nested]
    assert (done["frozen"].note, done["default"].default_factory) == ("kept", list)
    # What the model may have kept is not touched.
    assert nested["frozen"].logits.dtype is nested["output"].logits.dtype is dtype
    assert before["output"].keys() == done["output"].keys()


def test_opaque_values_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    value = object()
    assert cast_floats([value, value], halves_to_float) == [value, value]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "A model in mixed precision takes or returns a object; the tensors inside are not cast."


# Lightning's precision=


class ByHand(SmallTrial):
    """The small trial with its models under autocast, and outputs in float32, by its own code."""

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.body(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.head(hidden.float())
        return ((outputs.float() - targets) ** 2).mean()


def test_mixed_precision_is_autocast_by_hand() -> None:
    module, made = train_under("bf16-mixed")
    by_hand, _ = train_under("32-true", ByHand)
    assert made.precision == "bf16-mixed"
    assert torch.equal(weights_of(module.trial), weights_of(by_hand.trial))
    assert not torch.equal(weights_of(module.trial), weights_of(train_under("32-true")[0].trial))


def test_true_precision_casts_the_weights() -> None:
    module, _ = train_under("bf16-true")
    plain, _ = train_under("32-true")
    assert {p.dtype for model in module.context.models for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(weights_of(module.trial).float(), weights_of(plain.trial), rtol=0.1, atol=0.05)
    half, _ = train_under("16-true")
    assert {p.dtype for model in half.context.models for p in model.parameters()} == {torch.float16}


def test_latest_trainer_decides_the_precision(tmp_path: Path) -> None:
    module, made = train_under("bf16-mixed")
    made.save_checkpoint(tmp_path / "saved.ckpt")

    def validated(module: TrialModule, precision: Any, path: Path | None = None) -> Any:
        return trainer(precision=precision).validate(module, ckpt_path=path, verbose=False)

    plain = validated(TrialModule(SmallTrial), "32-true", tmp_path / "saved.ckpt")
    half = validated(module, "bf16-mixed")
    assert half != plain
    assert validated(module, "32-true") == plain
    assert validated(module, "bf16-mixed") == half


def test_precision_without_scaling_removes_the_scaler() -> None:
    scaling = WholeModelPrecision("a first trainer", torch.float16, scales=True)
    context = pytorch.PyTorchTrialContext()
    trial = SmallTrial(context)
    forward = trial.head.forward
    context.precision.use_whole_model_precision(scaling)
    assert context.precision.scales_losses
    context.precision.use_whole_model_precision(None)
    assert trial.head.forward == forward
    assert context.scaler is None
    assert not context.precision.scales_losses
    assert context.precision.path is context.backend.gradients


def test_cast_weights_stay_cast() -> None:
    module, _ = train_under("bf16-true")
    plain = trainer()
    with pytest.raises(errors.InvalidExperimentException, match=r"'bf16-true'.* cannot change to float32"):
        plain.fit(module)
    (expected,) = trainer(precision="bf16-true").validate(module, verbose=False)
    assert plain.validate(module, verbose=False) == [expected]  # where nothing is trained they may


class UsesAmp(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp()
        super().__init__(context)


class Autocasts(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.head = context.autocast_forward_pass(self.head)


@pytest.mark.parametrize("kind", [UsesAmp, Scaled, Autocasts, Leveled])
def test_two_precisions_are_refused(kind: type[Any]) -> None:
    message = "asks for a precision, and so does"
    with pytest.raises(errors.InvalidExperimentException, match=message):
        train_under("bf16-mixed", kind)
    with pytest.raises(errors.InvalidExperimentException, match=message), pytorch.init() as context:
        pytorch.Trainer(kind(context), context, precision="bf16-mixed").fit(max_length=pytorch.Batch(2))


class Doubles(SmallTrial):
    """Has a loss that takes doubles only together with doubles, and notes the types of what it computes."""

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        outputs = self.head(self.body(inputs))
        assert {inputs.dtype, targets.dtype, outputs.dtype} == {torch.float64}
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs, targets.sigmoid())
        assert loss.dtype is torch.float64
        return loss


def test_weights_are_double_under_64_true() -> None:
    module, _ = train_under("64-true", Doubles)
    assert weights_of(module.trial).dtype is torch.float64
