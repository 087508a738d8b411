"""A trial written as a LightningModule: what becomes of its lines. test_trials.py trains both."""

from __future__ import annotations

import ast
import shutil
import textwrap
from pathlib import Path

import pytest
from typer.testing import Result

from det_lightning.porting.ruff_rules import sort_imports
from det_lightning.porting.to_lightning import NoTrialError, write_module
from tests.porting.test_command import run as run_port
from tests.porting.test_trials import TRIALS


def trial_source(init: str = "pass", train: str = "return {}", rest: str = "") -> str:
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
    return textwrap.dedent(source) + textwrap.indent(textwrap.dedent(rest), "    ")


def written_trial(init: str = "pass", train: str = "return {}", rest: str = "") -> tuple[str, int]:
    """Write a small trial; return its module, and the number of comments in it."""
    result = write_module(trial_source(init, train, rest))
    return result.text, len(result.todos)


def test_context_in_init_is_rewritten() -> None:
    rewritten = {
        "self.x = context.get_hparam('x')": "self.x = self.hparams['x']",
        "self.y = A(self.context.get_hparams())": "self.y = A(self.hparams)",
        "a = f'{self.context.get_hparam(1)}'": "a = f'{self.hparams[1]}'",
        "self.z = context.get_global_batch_size()": 'self.z = self.hparams["global_batch_size"]',
        "self.model = context.wrap_model(model=M())": "self.model = M()",
    }
    written, todos = written_trial("; ".join(rewritten))
    assert "\n".join(f"        {after}" for after in rewritten.values()) in written
    assert todos == 0


@pytest.mark.parametrize(
    ("modes", "line"),
    [
        (["STEP_EVERY_EPOCH"], "if self.trainer.is_last_batch:"),
        (["STEP_EVERY_EPOCH", "STEP_EVERY_BATCH"], "# TODO: call self.s.step() when its step mode says"),
    ],
)
def test_step_modes_in_variables_are_read(modes: list[str], line: str) -> None:
    given = "; ".join(f"mode = LRScheduler.StepMode.{mode}" for mode in modes)
    written, _ = written_trial(f"{given}; self.s = context.wrap_lr_scheduler(s, step_mode=mode)")
    assert f"    def on_train_batch_end(self, outputs, batch, batch_idx):\n        {line}\n" in written


def test_context_of_another_file_is_rewritten() -> None:
    source = trial_source(train="self.context.backward(loss)").replace(
        "self.context = context", "super().__init__(context)"
    )
    callbacks = "    def build_callbacks(self):\n        return {'a': A(self.context)}\n"
    written = write_module(source + callbacks).text
    assert "        self.manual_backward(loss)\n" in written
    todo = "        # TODO: a LightningModule has no context; pass the needed values\n"
    assert f"    def configure_callbacks(self):\n{todo}" in written


NEEDS_LOGGER = "pl.Trainer needs a TensorBoardLogger for this: without a logger, self.logger is None"


def test_late_values_become_properties() -> None:
    late = {
        "_device": ("self.context.device", "self.device"),
        "rank": ("context.distributed.get_rank()", "self.global_rank"),
        "size": ("context.distributed.size", "self.trainer.world_size"),
        "b": ("context.get_per_slot_batch_size()", 'self.hparams["global_batch_size"] // self.trainer.world_size'),
        "writer": ("context.get_tensorboard_writer()", "self.logger.experiment"),
        "logger": ("context.get_tensorboard_writer()", "self.logger.experiment"),
        "path": ("context.get_tensorboard_path()", "pathlib.Path(self.logger.log_dir)"),
    }
    init = "; ".join(f"self.{name} = {given}" for name, (given, _) in late.items())
    written, todos = written_trial(init, train="; ".join(f"use(self.{name})" for name in late))
    for name, (_, value) in late.items():
        member = f"trial_{name}" if name in ("logger", "_device") else name
        todo = f"        # TODO: {NEEDS_LOGGER}\n" if "logger" in value else ""
        assert f"    @property\n    def {member}(self):\n{todo}        return {value}\n" in written
        assert f"        use(self.{member})\n" in written
        assert f"self.{name} =" not in written
    assert todos == 3
    assert f"# TODO: {NEEDS_LOGGER}" in written_trial(train="self.context.get_tensorboard_writer().flush()")[0]


def test_the_device_of_a_module_is_its_own() -> None:
    written, todos = written_trial("self.device = context.device", train="use(self.device)")
    assert "        use(self.device)\n" in written
    assert "@property" not in written and "self.device =" not in written
    assert todos == 0


@pytest.mark.parametrize(
    ("train", "todos"),
    [
        ("return {'lr': self.scheduler.get_last_lr()}", 1),
        ("metrics = {'names': [1, 2], 'kind': 'x'}; return metrics", 1),
        ("return {'loss': loss, 'per_class': {'a': loss}}", 1),
        ("name = 'a' 'b'; return {'name': name, 'b': '{}'.format(loss)}", 1),
        ("return {'lr': self.scheduler.get_last_lr()[0], 'loss': loss, 'n': len(x)}", 0),
    ],
)
def test_unloggable_metrics_get_comments(train: str, todos: int) -> None:
    written, found = written_trial(train=train)
    assert found == todos
    assert written.count("# TODO: Lightning logs numbers only: choose one number, or leave the metric out\n") == todos


def test_names_of_training_and_evaluation_are_marked() -> None:
    written, todos = written_trial(train="return {'a': 1}")
    assert '    # TODO: training_step() logs "a" too: rename one, or loggers mix the two\n    def validation' in written
    assert todos == 1


def test_get_hparam_may_have_an_alias() -> None:
    written, todos = written_trial("hp = self.context.get_hparam; self.rate = hp('lr')")
    assert "        hp = self.hparams.__getitem__\n        self.rate = hp('lr')\n" in written
    assert todos == 0


def test_init_uses_the_global_batch_size() -> None:
    init = "self.b = context.get_per_slot_batch_size(); self.sets = Sets(self.b, f'of {self.b}')"
    written, todos = written_trial(init, train="use(self.b)")
    sets = """self.sets = Sets(self.hparams["global_batch_size"], f'of {self.hparams.global_batch_size}')"""
    assert f"        {sets}\n" in written
    assert "        use(self.b)\n" in written and "@property" in written
    assert todos == 1


@pytest.mark.parametrize(
    ("init", "todos"),
    [
        ("if context.distributed.get_rank() == 0: download()", ["0 in every process here"]),
        ("w = context.get_tensorboard_writer()", ["not known in __init__"]),
        ("self.r = context.distributed.rank; self.r += 1", ["0 in every process here"]),
        ("self.device = context.device; self.x = x.to(self.device)", ["the CPU here"]),
        ("self.x = self.context.to_device(x)", ["the CPU here"]),
    ],
)
def test_trainer_values_in_init_are_marked(init: str, todos: list[str]) -> None:
    source = trial_source(init)
    assert [todo.text[: len(text)] for todo, text in zip(write_module(source).todos, todos, strict=True)] == todos


def test_workers_are_marked() -> None:
    for workers, todos in ((2, 1), (0, 0)):
        source = trial_source().replace("DataLoader([])", f"DataLoader([], num_workers={workers})")
        assert len(write_module(source).todos) == todos


def test_init_knows_one_process() -> None:
    written, todos = written_trial("self.x = 8 // self.context.distributed.get_size()")
    assert "        self.x = 8 // 1\n" in written
    assert todos == 1


def test_clipping_callbacks_get_a_call() -> None:
    clip = "pytorch.ClipGradsL2Norm(self.context.get_hparam('norm'))"
    written, todos = written_trial(rest=f"def build_callbacks(self): return {{'clip': {clip}}}")
    assert "return []" in written
    assert "self.clip_gradients(optimizer, gradient_clip_val=self.hparams['norm'], gradient_clip_algorithm=" in written
    assert todos == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.context.backward(a, retain_graph=True)", "self.manual_backward(a, retain_graph=True)"),
        ("a = self.context.to_device(b)", "a = self.transfer_batch_to_device(b, self.device, 0)"),
        ("a = self.context.is_epoch_end()", "a = self.trainer.is_last_batch"),
        ("a = f'é {self.context.device} {b}'", "a = f'é {self.device} {b}'"),
        ("return {'b': epoch_idx}", "epoch_idx = self.current_epoch\n        self.log_dict({'b': epoch_idx})"),
        ("if a: return {'b': 1}", "if a:\n            self.log_dict({'b': 1})\n            return"),
        ("return a", 'self.log_dict(metrics if isinstance(metrics, dict) else {"loss": metrics})'),
    ],
)
def test_context_in_steps_is_rewritten(before: str, after: str) -> None:
    written, todos = written_trial(train=before)
    assert f"        {after}\n" in written
    assert todos == 0


SCHEDULES = [f"context.wrap_lr_scheduler(s, LRScheduler.StepMode.STEP_EVERY_{kind})" for kind in ("EPOCH", "BATCH")]


@pytest.mark.parametrize(
    ("init", "todo"),
    [
        ("self.m = M(context)", "a LightningModule has no context"),
        ("self.s = context.get_trial_seed()", "pass the seed as trial_seed="),
        ("context.experimental.use_amp()", 'pass precision="16-mixed" to pl.Trainer'),
        ("self.r = context.wrap_reducer(r, name='r')", "use a metric of torchmetrics"),
        ("b = context.get_per_slot_batch_size()", "divide by the number of processes"),
        ("self.w = context.wrap_scaler(s)", "nothing replaces context.wrap_scaler(); leave the scaler out"),
        (
            "self.o = context.wrap_optimizer(O()) if a else None",
            "the hooks below must leave self.o out where it is not",
        ),
        ("self.s = " + " if a else ".join(SCHEDULES), "call self.s.step() when its step mode says"),
    ],
)
def test_doubts_get_comments(init: str, todo: str) -> None:
    written, todos = written_trial(init)
    assert f"        # TODO: {todo}" in written
    assert todos == 1


def test_metrics_are_reduced_as_before() -> None:
    one = 'self.log_dict({"a": 1}, reduce_fx="sum", batch_size=1, sync_dist=True)'
    for reducer, log in (("Reducer.SUM", one), ("{'a': Reducer.MAX}", 'reductions = {"a": "max"}')):
        written, _ = written_trial(rest=f"\ndef evaluation_reducer(self):\n    return {reducer}\n")
        assert log in written
        assert "evaluation_reducer" not in written
    either = "def evaluation_reducer(self):\n    if a: return Reducer.SUM\n    return Reducer.MAX"
    assert written_trial(rest=either)[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("context", "self, **hparams"),
        ("context: PyTorchTrialContext, a, *args: int, **more", "self, a, *args: int, **more"),
        ("context, hparams", "self, hparams"),
    ],
)
def test_arguments_of_the_trial_stay(given: str, kept: str) -> None:
    source = (TRIALS / "images.py").read_text().replace("context: PyTorchTrialContext)", f"{given})")
    assert f"def __init__({kept}) -> None:\n" in write_module(source).text


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


def test_optimizers_from_methods_count() -> None:
    helper = "def wrap(self, model):\n    return self.context.wrap_optimizer(Adam(model))\n"
    written, todos = written_trial("self.a, self.b = 1, 2; self.opt = self.wrap(self.a)", rest=helper)
    assert "        return [self.opt]\n" in written
    assert "        return Adam(model)\n" in written
    assert todos == 0


def test_quoted_annotations_lose_our_names() -> None:
    source = (TRIALS / "images.py").read_text()
    helper = (
        'def count(self, loader: "list[det.pytorch.DataLoader]", callback: "det.pytorch.PyTorchCallback") -> "int":'
    )
    start = source.index("    def evaluate_batch")
    with_helper = source[:start] + f"    {helper}\n        return len(loader)\n\n" + source[start:]
    written = write_module("import det_lightning as det\n" + with_helper).text
    assert 'def count(self, loader: "list[torch.utils.data.DataLoader]", callback: "Any") -> "int":' in written
    assert "import det_lightning" not in written


@pytest.mark.slow
def test_other_imported_names_stay() -> None:
    source = (TRIALS / "images.py").read_text()
    written = write_module("import collections, determined\n" + source).text
    assert "import collections\n" in written
    assert "determined" not in written.partition("class ")[0]
    plain = write_module(source).text
    assert sort_imports(plain) == plain
    assert plain.index("import pytorch_lightning as pl") < plain.index("import torch\n") < plain.index("from torch")


def test_odd_forms_stay_readable() -> None:
    written = write_module(ODD).text
    ast.parse(written)
    for line in (
        '            self.hparams[self.hparams["x"]],',
        "        self.opt = Adam(Model().parameters())",
        "        self.trial_optimizers = [SGD(model) for model in self.models]",
        "        if model:",
        "            # TODO: override transfer_batch_to_device() to leave batches where they are\n            pass",
        "        # TODO: keep these models in a torch.nn.ModuleList: Lightning saves and moves no other lists",
        "    @torch.enable_grad()\n    def training_step(self, batch: Any, batch_idx: int) -> None:",
        "        lightning_optimizer = self.optimizers()[0]  # self.opt",
        "        return [self.opt, *self.trial_optimizers]",
        "    def val_dataloader(self):\n        return self.train_dataloader()",
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
            "class A(PyTorchTrial):\n def build_model(self): ...\n def optimizer(self, model): ...",
            "A has the interface before Determined 0.12.13",
        ),
    ],
)
def test_one_complete_trial_is_needed(text: str, message: str) -> None:
    with pytest.raises(NoTrialError, match=message):
        write_module(text)


def run(*arguments: object, ends_with: int = 0) -> Result:
    return run_port("--to", "lightning", *arguments, ends_with=ends_with)


@pytest.mark.slow
def test_the_command_writes_or_prints(tmp_path: Path) -> None:
    trial, output = TRIALS / "adversaries.py", tmp_path / "module.py"
    printed = run(trial)
    run(trial, "--output", output)
    assert output.read_text() == printed.stdout
    assert printed.stderr.startswith("Nothing is left to do.\nTo train the module")
    assert "from module import AdversariesModule\n" in printed.stderr
    assert "fit(AdversariesModule(global_batch_size=..., lr=..., noise=...))\n" in printed.stderr
    assert "exists; --force replaces it" in run(trial, "-o", output, ends_with=2).stderr
    run(trial, "-o", output, "--force")
    assert "5 TODO comments to look at.\n" in run(TRIALS / "detections.py").stderr


@pytest.mark.slow
def test_the_package_of_lightning_stays(tmp_path: Path) -> None:
    shutil.copy(TRIALS / "adversaries.py", tmp_path / "trial.py")
    for other_file, imported in (
        ("import lightning as L\n", "lightning.pytorch"),
        ("from lightning.pytorch import Trainer\n", "lightning.pytorch"),
        ("from pytorch_lightning import Trainer\n", "pytorch_lightning"),
        ("import lightning_fabric\n", "pytorch_lightning"),
    ):
        (tmp_path / "other.py").write_text(other_file)
        printed = run(tmp_path / "trial.py")
        assert f"import {imported} as pl\n" in printed.stdout
        assert f"import {imported} as pl\n" in printed.stderr


@pytest.mark.slow
def test_wrong_arguments_are_usage_errors(tmp_path: Path) -> None:
    wrong = {"python2.py": b"import determined\nprint 1", "latin.py": b"# \xe9", "none.py": b"x = 1\n"}
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        assert f"{name} " in run(tmp_path / name, "-o", tmp_path / "out", ends_with=2).stderr
    assert "takes one file" in run(TRIALS / "adversaries.py", TRIALS / "images.py", ends_with=2).stderr
    assert "There is no file" in run(tmp_path, ends_with=2).stderr
    assert not (tmp_path / "out").exists()
