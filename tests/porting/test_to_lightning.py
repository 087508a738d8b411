"""A trial written as a LightningModule trains as the trial does, to the bit."""

from __future__ import annotations

import ast
import random
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from typer.testing import CliRunner, Result

import det_lightning as det
from det_lightning.adapters import TrialModule
from det_lightning.cli.app import app
from det_lightning.porting.to_lightning import NoTrialError, write_module
from tests.porting.test_trials import HPARAMS, TRIALS, load, ported

EPOCHS = 3
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class Losses(pl.Callback):
    """Keeps what is logged as the loss of each batch, and the learning rates that it was trained with."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates += [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.values.append(trainer.callback_metrics["loss"].item())


def train_trial(module: Any, name: str, hparams: dict[str, Any]) -> tuple[Losses, dict[str, float], list[torch.Tensor]]:
    seen = Losses()

    class Recorded(getattr(module, f"{name.capitalize()}Trial")):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            optimizers = self.context.optimizers
            seen.rates += [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            loss = metrics["loss"] if isinstance(metrics, dict) else metrics
            seen.values.append(loss.item())
            return metrics

    seed()
    context = det.pytorch.PyTorchTrialContext(
        hparams=hparams, exp_conf={"data": hparams.get("data")}, enable_tensorboard_logging=False
    )
    trial = Recorded(context)
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", **QUIET)
    trainer.fit(TrialModule(trial, context=context))
    metrics = {name.removeprefix("val_"): value.item() for name, value in trainer.callback_metrics.items()}
    weights = [parameter.detach().clone() for model in context.models for parameter in model.parameters()]
    return seen, metrics, weights


def train_written(
    module: Any, name: str, hparams: dict[str, Any]
) -> tuple[Losses, dict[str, float], list[torch.Tensor]]:
    seen = Losses()
    seed()
    written = getattr(module, f"{name.capitalize()}Module")(**hparams)
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", num_sanity_val_steps=0, callbacks=[seen], **QUIET)
    trainer.fit(written)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return seen, metrics, [parameter.detach().clone() for parameter in written.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "adversaries", "words", "sentences"])
def test_the_module_trains_as_the_trial_does(name: str, tmp_path: Path) -> None:
    written, todos = write_module((TRIALS / f"{name}.py").read_text())
    assert todos == {"images": 1, "sentences": 2}.get(name, 0)  # the script; the section "data", several processes
    assert "det_lightning" not in "".join(line for line in written.splitlines() if not line.startswith("#"))
    file = tmp_path / f"written_{name}.py"
    file.write_text(written)
    hparams = {**HPARAMS[name], "global_batch_size": 4}
    theirs, their_metrics, their_weights = train_trial(load(ported(name, tmp_path)), name, dict(hparams))
    ours, our_metrics, our_weights = train_written(load(file), name, hparams)
    assert len(ours.values) >= 2 * EPOCHS
    assert ours.values == theirs.values
    assert ours.rates == theirs.rates
    assert len(our_weights) == len(their_weights)
    assert all(torch.equal(our, their) for our, their in zip(our_weights, their_weights, strict=True))
    assert our_metrics.keys() == their_metrics.keys()
    for metric in our_metrics.keys() - {"loss", "g_loss", "d_loss"}:  # those of training are means for a trial
        assert our_metrics[metric] == pytest.approx(their_metrics[metric], rel=1e-6)


def written_trial(init: str = "pass", train: str = "return {}", rest: str = "") -> tuple[str, int]:
    """Write a small trial; return its module without what is always the same."""
    source = f"""
        from determined.pytorch import DataLoader, LRScheduler, PyTorchTrial, Reducer
        class MyTrial(PyTorchTrial):
            def __init__(self, context):
                self.context = context
                {init}
            def train_batch(self, batch, epoch_idx, batch_idx):
                {train}
            def evaluate_batch(self, batch):
                return {{"a": 1}}
            def build_training_data_loader(self):
                return DataLoader([])
            build_validation_data_loader = build_training_data_loader
        """
    return write_module(textwrap.dedent(source) + textwrap.indent(textwrap.dedent(rest), "    "))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.x = context.get_hparam('x')", "self.x = self.hparams['x']"),
        ("self.x = A(self.context.get_hparams())", "self.x = A(self.hparams)"),
        ("self.device = self.context.device", "self.trial_device = self.device"),
        ("self.x = context.distributed.get_rank()", "self.x = self.global_rank"),
        ("self.x = context.get_global_batch_size()", 'self.x = self.hparams["global_batch_size"]'),
        ("self.logger = context.get_tensorboard_writer()", "self.trial_logger = self.logger.experiment"),
        ("self.model = context.wrap_model(model=M())", "self.model = M()"),
    ],
)
def test_uses_of_the_context_in_init_are_rewritten(before: str, after: str) -> None:
    written, todos = written_trial(before)
    assert f"        {after}\n" in written
    assert todos == 0


def test_the_number_of_processes_is_not_known_in_init() -> None:
    written, todos = written_trial("self.x = 8 // self.context.distributed.get_size()")
    assert "        self.x = 8 // 1\n" in written
    assert todos == 1


def test_a_clipping_callback_becomes_a_call_of_clip_gradients() -> None:
    written, todos = written_trial(
        rest="def build_callbacks(self): return {'clip': pytorch.ClipGradsL2Norm(self.context.get_hparam('norm'))}"
    )
    assert "return []" in written
    assert "self.clip_gradients(optimizer, gradient_clip_val=self.hparams['norm'], gradient_clip_algorithm=" in written
    assert todos == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.context.backward(a, retain_graph=True)", "self.manual_backward(a, retain_graph=True)"),
        ("a = self.context.to_device(b)", "a = self.transfer_batch_to_device(b, self.device, 0)"),
        ("self.context.set_stop_requested(True)", "self.trainer.should_stop = True"),
        ("a = self.context.is_epoch_end()", "a = self.trainer.is_last_batch"),
        ("a = self.context._epoch_len", "a = self.trainer.num_training_batches"),
        ("a = f'é {self.context.device} {b}'", "a = f'é {self.device} {b}'"),
        ("return {'a': epoch_idx}", "epoch_idx = self.current_epoch\n        self.log_dict({'a': epoch_idx})"),
        ("if a: return {'a': 1}", "if a: self.log_dict({'a': 1}); return"),
        ("return a", 'self.log_dict(metrics if isinstance(metrics, dict) else {"loss": metrics})'),
    ],
)
def test_uses_of_the_context_in_a_step_are_rewritten(before: str, after: str) -> None:
    written, todos = written_trial(train=before)
    assert f"        {after}\n" in written
    assert todos == 0


@pytest.mark.parametrize(
    ("init", "todo"),
    [
        ("self.m = M(context)", "a LightningModule has no context"),
        ("self.s = context.get_trial_seed()", "pass the seed as seed="),
        ("context.experimental.use_amp()", 'pass precision="16-mixed" to pl.Trainer'),
        ("self.r = context.wrap_reducer(r, name='r')", "use a metric of torchmetrics"),
        ("self.c = context.get_experiment_config()", "nothing replaces context.get_experiment_config()"),
        ("self.b = context.get_per_slot_batch_size()", "divide by the number of processes"),
    ],
)
def test_what_needs_judgement_gets_a_comment(init: str, todo: str) -> None:
    written, todos = written_trial(init)
    assert f"        # TODO: {todo}" in written
    assert todos == 1


@pytest.mark.parametrize(
    ("reducer", "log"),
    [
        ("Reducer.SUM", 'self.log_dict({"a": 1}, reduce_fx="sum", batch_size=1, sync_dist=True)'),
        ("{'a': Reducer.MAX}", 'reductions = {"a": "max"}'),
    ],
)
def test_metrics_are_reduced_as_before(reducer: str, log: str) -> None:
    written, _ = written_trial(rest=f"\ndef evaluation_reducer(self):\n    return {reducer}\n")
    assert log in written
    assert "evaluation_reducer" not in written


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("context", "self, **hparams"),
        ("context, size: int = 2, *, b=1", "self, size: int = 2, *, b=1, **hparams"),
        ("context: PyTorchTrialContext, a, *args: int, **more", "self, a, *args: int, **more"),
        ("context, hparams", "self, hparams"),
    ],
)
def test_arguments_of_the_trial_stay(given: str, kept: str) -> None:
    source = (TRIALS / "images.py").read_text().replace("context: PyTorchTrialContext)", f"{given})")
    assert f"def __init__({kept}) -> None:\n" in write_module(source)[0]


ODD = """
import determined.pytorch as dp
class OddTrial(dp.PyTorchTrial):
    def __init__(self, context):
        self.ctx: dp.PyTorchTrialContext = context
        self.models = [context.wrap_model(
            Model(
                self.ctx.get_hparam(self.ctx.get_hparam(
                    "x"
                )),
            ),
        ) for _ in range(3)]
        self.opt = self.ctx.wrap_optimizer(Adam(context.wrap_model(Model()).parameters()))
        self.optimizers = [self.ctx.wrap_optimizer(SGD(model)) for model in self.models]
        model = Model(); model = self.ctx.wrap_model(model)
        if model: self.ctx.experimental.disable_auto_to_device()
    @torch.enable_grad()
    def train_batch(
        self,
        batch: dp.TorchData,  # the (batch):
        epoch_idx: int,
        batch_idx: int,
    ) -> dict:
        '''What: this'''
        for i, optimizer in enumerate(self.optimizers):
            if i: self.ctx.step_optimizer(optimizer, clip_grads=clip if i else (lambda p: p))
        if batch_idx: return {}
        self.ctx.step_optimizer(self.opt, auto_zero_grads=False)
    def evaluate_batch(self, batch): return {"é": 1}
    def build_training_data_loader(self): return dp.DataLoader([])
    def build_validation_data_loader(self): return self.build_training_data_loader()
    def get_batch_length(self, batch): return 1
class After: pass
"""


def test_an_optimizer_that_a_method_wraps_is_configured() -> None:
    helper = """
        def wrap(self, model):
            return self.context.wrap_optimizer(Adam(model))
        """
    written, todos = written_trial("self.a, self.b = 1, 2; self.opt = self.wrap(self.a)", rest=helper)
    assert "        return [self.opt]\n" in written
    assert "        return Adam(model)\n" in written
    assert todos == 0


def test_a_return_of_no_metrics_is_removed_at_the_end_of_the_class() -> None:
    evaluate = "def evaluate_batch(self, batch):\n    self.x.update(batch)\n    return {}\nx = 1"
    source = (TRIALS / "images.py").read_text()
    start = source.index("    def evaluate_batch")
    written, _ = write_module(source[:start] + textwrap.indent(evaluate, "    ").replace("    x = 1", "x = 1"))
    assert "    self.x.update(batch)\n\n    def on_train_batch_end" in written
    assert "[self.scheduler]\nx = 1" in written


def test_annotations_in_strings_need_no_det_lightning() -> None:
    source = (TRIALS / "images.py").read_text()
    helper = (
        'def count(self, loader: "list[det.pytorch.DataLoader]", callback: "det.pytorch.PyTorchCallback") -> "int":'
    )
    start = source.index("    def evaluate_batch")
    with_helper = source[:start] + f"    {helper}\n        return len(loader)\n\n" + source[start:]
    written, _ = write_module("import det_lightning as det\n" + with_helper)
    assert 'def count(self, loader: "list[torch.utils.data.DataLoader]", callback: "Any") -> "int":' in written
    assert "import det_lightning" not in written


def test_other_imports_of_the_same_statement_stay() -> None:
    source = (TRIALS / "images.py").read_text()
    written, _ = write_module("import collections, determined\n" + source)
    assert "import collections\n" in written
    assert "determined" not in written.partition("class ")[0]


def test_odd_forms_stay_readable() -> None:
    written, _ = write_module(ODD)
    ast.parse(written)
    for line in (
        '            self.hparams[self.hparams["x"]],',
        "        self.opt = Adam(Model().parameters())",
        "        self.trial_optimizers = [SGD(model) for model in self.models]",
        "        if model: pass",
        "    @torch.enable_grad()\n    def training_step(self, batch: Any, batch_idx: int) -> None:",
        "        lightning_optimizer = self.optimizers()[0]  # self.opt",
        "        return [self.opt, *self.trial_optimizers]",
        "    def val_dataloader(self): return self.train_dataloader()",
        "class After: pass",
    ):
        assert f"{line}\n" in written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "exactly one class must derive from PyTorchTrial; found: none"),
        ("class A(PyTorchTrial): ...\nclass B(PyTorchTrial): ...\n", "found: A, B"),
        ("class A(PyTorchTrial): ...\n", "A does not define __init__, train_batch, build_training_data_loader"),
        (
            "class A(PyTorchTrial):\n    def build_model(self): ...\n    def optimizer(self, model): ...\n",
            "A has the interface before Determined 0.12.13",
        ),
    ],
)
def test_a_file_without_exactly_one_complete_trial_is_refused(text: str, message: str) -> None:
    with pytest.raises(NoTrialError, match=message):
        write_module(text)


def run(*arguments: object, ends_with: int = 0) -> Result:
    result = CliRunner().invoke(app, ["port", "--to", "lightning", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result


@pytest.mark.slow
def test_the_command_writes_to_the_standard_output_or_to_a_file(tmp_path: Path) -> None:
    trial, output = TRIALS / "words.py", tmp_path / "module.py"
    printed = run(trial)
    run(trial, "--output", output)
    assert output.read_text() == printed.stdout
    assert printed.stderr == "Nothing is left to do.\n"
    assert "exists; --force replaces it" in run(trial, "-o", output, ends_with=2).stderr
    run(trial, "-o", output, "--force")
    assert run(TRIALS / "detections.py").stderr == "4 TODO comments to look at.\n"


def test_wrong_arguments_are_usage_errors(tmp_path: Path) -> None:
    wrong = {"python2.py": b"import determined\nprint 1", "latin.py": b"# \xe9", "none.py": b"x = 1\n"}
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        assert f"{name} " in run(tmp_path / name, "-o", tmp_path / "out", ends_with=2).stderr
    assert "takes one file" in run(TRIALS / "words.py", TRIALS / "images.py", ends_with=2).stderr
    assert "There is no file" in run(tmp_path, ends_with=2).stderr
    assert not (tmp_path / "out").exists()
