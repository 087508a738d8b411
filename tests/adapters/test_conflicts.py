"""What a user does to a module before ``fit``, and what a trial does beside a flag: never ignored without a word."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors
from det_lightning.adapters import TrialModule
from det_lightning.adapters.lightning_package import VARIABLE
from tests.adapters.training import Trial, trained
from tests.lightning import fit, pl, trainer
from tests.trials import SmallTrial, weights_of


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda module: module.hparams.update(learning_rate=0.5), "learning_rate"),
        (lambda module: setattr(module.hparams, "learning_rate", 0.5), "learning_rate"),
        (lambda module: module.hparams["layers"].append(3), "layers"),
        (lambda module: module.hparams.update(new=1), "new"),
        (lambda module: module.hparams.pop("layers"), "layers"),
    ],
)
def test_changed_hparams_are_refused(change: Callable[[Any], Any], changed: str) -> None:
    module = TrialModule(SmallTrial, {"learning_rate": 0.1, "layers": [1, 2], "nothing": float("nan")})
    change(module)
    refusal = rf"module.hparams was changed \({changed}\).*Create a new module"
    with pytest.raises(errors.InvalidExperimentException, match=refusal):
        trainer().fit(module)


def test_missing_parameters_are_warned_of(caplog: Any) -> None:
    uses: list[Callable[[Any], Any]] = [
        lambda module: module.freeze(),
        lambda module: module.requires_grad_(False),
        lambda module: module.apply(lambda part: part),
        lambda module: list(module.parameters()),
        lambda module: module.state_dict(),
    ]
    module = TrialModule(SmallTrial)
    for use in uses:
        caplog.clear()
        use(module)
        assert re.search(r"has no parameters of its trial before fit\(\).*do it in on_fit_start\(\)", caplog.text)
    caplog.clear()
    trainer().fit(module)
    for use in uses:
        use(module)
    assert "has no parameters" not in caplog.text


def test_parameters_can_be_frozen_in_on_fit_start() -> None:
    class Module(TrialModule):
        def on_fit_start(self) -> None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = not name.startswith("models.0.")
            before.append(weights_of(self.trial))

    before: list[torch.Tensor] = []
    now = weights_of(trained(Module(SmallTrial)).trial)
    first = 4 * 8 + 8  # weights and biases of the first model
    assert torch.equal(now[:first], before[0][:first])
    assert not torch.equal(now, before[0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "saved.ckpt"
    fit(TrialModule(SmallTrial)).save_checkpoint(file)
    return file


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda module: module.freeze(), "frozen parameters"),
        (lambda module: next(module.parameters()).register_hook(lambda gradient: None), "hooks"),
    ],
)
def test_lost_changes_are_refused(change: Callable[[Any], Any], named: str, saved: Path) -> None:
    module = TrialModule.load_from_checkpoint(saved, trial=SmallTrial)
    change(module)
    with pytest.raises(errors.InvalidExperimentException, match=named):
        trainer().fit(module)


def test_an_early_cast_is_refused() -> None:
    for method, arguments in (("double", []), ("half", []), ("to", [torch.bfloat16])):
        module = getattr(TrialModule(SmallTrial), method)(*arguments)
        with pytest.raises(errors.InvalidExperimentException, match=r"cast to .*pl.Trainer\(precision="):
            trainer().fit(module)


class Clipless(SmallTrial):
    """Leaves the clipping of one optimizer to the trainer, and clips for the other itself, to nothing."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            self.before = weights_of(self)[:40].clone()
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.sgd)
        self.context.step_optimizer(self.adam, clip_grads=lambda p: torch.nn.utils.clip_grad_value_(p, 1e-30))
        return {"loss": loss}


def test_two_clippings_are_warned_of_once(caplog: Any) -> None:
    trial = trained(Clipless, gradient_clip_val=0.1).trial
    assert torch.equal(weights_of(trial)[:40], trial.before), "the trial's own clipping leaves nothing to its optimizer"
    warnings = [record.getMessage() for record in caplog.records if "gradient_clip_val" in record.getMessage()]
    assert len(warnings) == 1
    assert "gradient_clip_val=0.1 has no effect on Adam: the trial clips its gradients" in warnings[0]
    caplog.clear()
    trainer().fit(TrialModule(Clipless))
    assert "clips" not in caplog.text


def test_evaluation_mode_is_warned_of(caplog: Any) -> None:
    class Module(TrialModule):
        def on_train_start(self) -> None:
            self.models.eval()

    trainer().fit(Module(SmallTrial))
    assert "in evaluation mode. As in Determined, a trial trains in training mode" in caplog.text
    caplog.clear()
    trained(trained())
    assert "evaluation mode" not in caplog.text
    trainer().fit(TrialModule(SmallTrial).eval())
    assert "in evaluation mode" in caplog.text


def test_modes_come_back_after_a_validation() -> None:
    class Module(TrialModule):
        def on_validation_end(self) -> None:
            modes.append(self.models[0].training)

        on_train_epoch_end = on_validation_end

    modes: list[bool] = []
    module = Module(SmallTrial)
    trainer().fit(module)
    trainer().validate(module, verbose=False)
    assert [*modes, module.models[0].training] == [False, True, False, True]


def test_parts_of_a_subclass_are_evaluated() -> None:
    class Module(TrialModule):
        def __init__(self) -> None:
            super().__init__(SmallTrial)
            self.extra = torch.nn.Dropout()

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            modes.append((self.training, self.extra.training))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            modes.append((self.training, self.extra.training))

    modes: list[tuple[bool, bool]] = []
    trainer(limit_train_batches=1, limit_val_batches=1, max_epochs=2).fit(Module())
    assert modes == [(True, True), (False, False)] * 2


def test_a_cut_epoch_is_warned_of(caplog: Any) -> None:
    class Module(TrialModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    trainer().fit(Module(SmallTrial))
    assert "on_train_batch_start() returned -1, which ends an epoch of Lightning" in caplog.text


def test_automatic_optimization_is_refused() -> None:
    module = TrialModule(SmallTrial)
    module.automatic_optimization = True
    with pytest.raises(errors.InvalidExperimentException, match="automatic_optimization was set to True"):
        trainer().fit(module)


def test_a_second_fit_is_warned_of(caplog: Any) -> None:
    module, fitting = TrialModule(SmallTrial), trainer()
    fitting.fit(module)
    fitting.fit(module)
    assert "begins at epoch 0 again" not in caplog.text
    fitting.fit_loop.max_epochs = 3
    fitting.fit(module)
    assert "has trained 1 epochs, and this fit() begins at epoch 0 again" in caplog.text


@pytest.mark.parametrize(
    ("trial", "then", "warns"),
    [
        (SmallTrial, lambda first, module, path: trainer().fit(module), True),
        (Trial, lambda first, module, path: trainer().fit(module), False),  # its optimizer keeps nothing
        (SmallTrial, lambda first, module, path: first.fit(module), False),
        (SmallTrial, lambda first, module, path: trainer().validate(module, verbose=False), False),
        (SmallTrial, lambda first, module, path: trainer(max_epochs=2).fit(module, ckpt_path=path), False),
    ],
)
def test_a_second_trainer_is_warned_of(
    trial: type[Any], then: Callable[[pl.Trainer, TrialModule, Path], Any], warns: bool, caplog: Any, tmp_path: Path
) -> None:
    module, first = TrialModule(trial), trainer()
    first.fit(module)
    first.save_checkpoint(tmp_path / "it.ckpt")
    then(first, module, tmp_path / "it.ckpt")
    first.validate(module, verbose=False)
    assert ("Another pl.Trainer has trained this module, and the trial keeps the state of its" in caplog.text) == warns


@pytest.mark.parametrize("name", ["lightning.py", "lightning/__init__.py"])
def test_files_named_lightning_are_not_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for module in {"lightning", *sys.modules}:  # as in a new process
        if module.partition(".")[0] in ("lightning", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, module, None)
            del sys.modules[module]
    (tmp_path / "script.py").write_text(
        "import lightning\nfrom det_lightning.adapters import lightning_package\nchosen = lightning_package._choose()"
    )
    assert runpy.run_path(str(tmp_path / "script.py"))["chosen"] == "pytorch_lightning"
