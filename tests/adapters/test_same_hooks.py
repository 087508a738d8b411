"""Every hook of a callback: of a trial's run the same, in order and arguments, as of a plain module's.

The plain module trains with manual optimization: the same model on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import pytorch
from det_lightning.adapters import TrialModule
from tests.adapters.training import Plain, Trial
from tests.lightning import pl, trainer

HOOKS = sorted(name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class Recorder(pl.Callback):
    """Notes each hook with the facts of its arguments, and where the trainer says it is."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._batches: list[Any] = []

    def fact(self, argument: Any) -> Any:
        if isinstance(argument, list):  # a batch: which object, and its contents
            if not any(argument is known for known in self._batches):
                self._batches.append(argument)
            number = next(index for index, known in enumerate(self._batches) if known is argument)
            return number, [(tuple(part.shape), part.double().sum().item()) for part in argument]
        if isinstance(argument, torch.Tensor):
            return argument.requires_grad, argument.tolist()
        if isinstance(argument, torch.optim.Optimizer):
            return type(argument), [p.grad is None for group in argument.param_groups for p in group["params"]]
        if isinstance(argument, dict):
            entries = [] if "state_dict" in argument else argument.items()  # a checkpoint, or outputs
            return type(argument), {name: self.fact(value) for name, value in entries}
        return argument

    def note(self, what: str, *arguments: Any, **keywords: Any) -> None:
        self.events.append((what, *map(self.fact, (*arguments, *keywords.values()))))


def recording(hook: str) -> Callable[..., None]:
    def record(self: Recorder, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any, **keywords: Any) -> None:
        loop = trainer.fit_loop
        where = (trainer.global_step, trainer.current_epoch, loop.batch_idx, loop.total_batch_idx)
        self.note(f"{hook} at {where} while {trainer.state.stage}", *rest, **keywords)

    return record


for hook in HOOKS:
    setattr(Recorder, hook, recording(hook))


def make_models() -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)]


def make_optimizers(models: list[torch.nn.Module], count: int) -> list[torch.optim.Optimizer]:
    if count == 1:
        return [torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.01)]
    return [torch.optim.SGD(models[0].parameters(), lr=0.01), torch.optim.Adam(models[1].parameters(), lr=0.01)]


def loss_of(models: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return torch.as_tensor((models[1](models[0](inputs)) - targets).square().mean())


class PlainModule(Plain):
    def __init__(self, recorder: Recorder, optimizer_count: int, aggregation: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recorder, self.optimizer_count, self.aggregation = recorder, optimizer_count, aggregation
        self.models = torch.nn.ModuleList(make_models())

    def configure_optimizers(self) -> Any:
        return make_optimizers(list(self.models), self.optimizer_count)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.recorder.note("train_batch", batch)
        self.trained += 1
        loss = loss_of(self.models, batch)
        self.manual_backward(loss)
        if self.trained % self.aggregation == 0:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
                # Manual optimization leaves this hook to the module.
                for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                    callback.on_before_zero_grad(self.trainer, self, optimizer.optimizer)
                optimizer.zero_grad()
        return {"loss": loss, "samples": len(batch[0])}

    def on_validation_model_zero_grad(self) -> None:
        """Keep the gradients of an unfinished aggregation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.recorder.note("evaluate_batch", batch)
        return {"validation_loss": loss_of(self.models, batch)}


class RecordedTrial(Trial):
    def __init__(self, context: pytorch.PyTorchTrialContext, recorder: Recorder, optimizer_count: int) -> None:
        self.context = context
        self.recorder = recorder
        self.models = [context.wrap_model(model) for model in make_models()]
        self.optimizers = [context.wrap_optimizer(o) for o in make_optimizers(self.models, optimizer_count)]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.recorder.note("train_batch", batch)
        loss = loss_of(self.models, batch)
        self.context.backward(loss)
        for optimizer in self.optimizers:
            self.context.step_optimizer(optimizer)
        return {"loss": loss, "samples": len(batch[0])}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.recorder.note("evaluate_batch", batch)
        return {"validation_loss": loss_of(self.models, batch)}


def events_of(module: pl.LightningModule, recorder: Recorder, directory: Path, **flags: Any) -> list[tuple[Any, ...]]:
    saves = {"every_n_train_steps": flags.pop("saves_every")} if "saves_every" in flags else None
    saving = [pl.callbacks.ModelCheckpoint(directory, save_top_k=-1, **saves)] if saves else []
    made = trainer([recorder, *saving], num_sanity_val_steps=0, **flags)
    made.fit(module)
    if flags.get("max_steps"):
        made.validate(module, verbose=False)
    return recorder.events


@pytest.mark.parametrize(
    ("count", "aggregation", "flags"),
    [
        (1, 1, {"max_epochs": 2}),
        (2, 1, {"max_epochs": 2}),
        (1, 3, {"max_epochs": 2}),
        (1, 1, {"max_epochs": 2, "val_check_interval": 3}),
        (2, 1, {"max_epochs": 3, "check_val_every_n_epoch": 2, "limit_val_batches": 2}),
        (1, 1, {"max_epochs": -1, "max_steps": 9, "check_val_every_n_epoch": None, "val_check_interval": 4}),
        (2, 1, {"max_epochs": 2, "saves_every": 4}),
        (1, 1, {"fast_dev_run": True}),
    ],
)
def test_hooks_are_those_of_a_plain_module(count: int, aggregation: int, flags: dict[str, Any], tmp_path: Path) -> None:
    plain, of_trial = Recorder(), Recorder()
    expected = events_of(PlainModule(plain, count, aggregation), plain, tmp_path / "plain", **flags)
    kwargs = {"recorder": of_trial, "optimizer_count": count}
    averages: dict[str, Any] = {"aggregation_frequency": aggregation, "average_aggregated_gradients": False}
    module = TrialModule(RecordedTrial, trial_kwargs=kwargs, **averages)
    found = events_of(module, of_trial, tmp_path / "trial", **flags)
    for position, (hook, wanted) in enumerate(zip(found, expected, strict=False)):
        assert hook == wanted, f"event {position}"
    assert len(found) == len(expected)
    names = {name.split(" at ")[0] for name, *_ in expected}
    assert names >= {"on_train_batch_start", "on_before_backward", "on_before_zero_grad", "on_validation_batch_end"}
