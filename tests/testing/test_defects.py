"""A correct trial, broken in many ways: each is caught by the check that is about it, with the culprit named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from det_lightning.testing.checks import CHECKS
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, CheckFailed
from det_lightning.testing.records.record import write_record
from det_lightning.testing.training.runs import TrialRuns

pytestmark = pytest.mark.slow

CORRECT = Path(__file__).with_name("correct_trial.py").read_text()
HPARAMS = {"lr": 0.02, "global_batch_size": 4}

CONTEXT = "trains through its context"
DEVICE = "uses no hard-coded device"
DETERMINISTIC = "is deterministic under a seed"
GROUPS = "has no process-group code of its own"
METRICS = "validates with JSON-serializable metrics of stable names"
MOVES = "moves every trainable parameter"
PROCESSES = "two processes agree with one"
REFERENCE = "matches the real determined"
RESUMES = "resumes bit-equal in the middle of an epoch"
ROUND_TRIP = "checkpoint round-trips"
STATE = "checkpoint contains all the state that training changes"
AGGREGATION = "trains under aggregation"


@dataclasses.dataclass(frozen=True)
class Defect:
    """A way to break the trial.

    Attributes:
        name: what is wrong.
        check: which one has to catch it.
        says: patterns that its message has to have, in any order.
        changes: texts to replace, with what.
    """

    name: str
    check: str
    says: tuple[str, ...]
    changes: dict[str, str]

    def source(self) -> str:
        source = CORRECT
        for old, new in self.changes.items():
            assert source.count(old) >= 1, old
            source = source.replace(old, new)
        return source


LOSS = "        loss = self.loss(batch)\n        self.context.backward"
HEAD = "self.head = context.wrap_model(torch.nn.Linear(4, 1))"
SGD = "context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9))"
SCHEDULER = """context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.adam, gamma=0.9),
            pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )"""
NEW_BEST = 'self.best = min(self.best, float(metrics["validation_loss"]))'
SAVED = '{"best": self.best}\n\n    def load_state_dict'
RETURN = 'return {"loss": loss}'
EVALUATED = 'return {"validation_loss": self.loss(batch)}'


def before_loss(line: str, loss: str = "self.loss(batch)") -> dict[str, str]:
    return {LOSS: f"        {line}\n        loss = {loss}\n        self.context.backward"}


DEFECTS = [
    Defect(
        "unwrapped model",
        STATE,
        ("model trial.head", "weight", "wrap_model"),
        {HEAD: "self.head = torch.nn.Linear(4, 1)"},
    ),
    Defect(
        "unwrapped optimizer",
        STATE,
        (r"optimizer trial.sgd \(SGD\)", "momentum_buffer", "wrap_optimizer"),
        {SGD: SGD[len("context.wrap_optimizer(") : -1], "self.context.step_optimizer(self.sgd)": "self.sgd.step()"},
    ),
    Defect(
        "unwrapped optimizer that is stepped",
        CONTEXT,
        ("steps a SGD that is not wrapped", r"model_def.py:\d+"),
        {SGD: SGD[len("context.wrap_optimizer(") : -1], "self.context.step_optimizer(self.sgd)": "self.sgd.step()"},
    ),
    Defect(
        "unwrapped scheduler",
        STATE,
        (r"scheduler trial.scheduler \(ExponentialLR\)", "last_epoch", "wrap_lr_scheduler"),
        {
            SCHEDULER: "torch.optim.lr_scheduler.ExponentialLR(self.adam, gamma=0.9)",
            RETURN: f"self.scheduler.step()\n        {RETURN}",
        },
    ),
    Defect(
        "scheduler stepped twice",
        CONTEXT,
        (r"step\(\) of ExponentialLR", "STEP_EVERY_EPOCH", "stepped twice", r"model_def.py:\d+"),
        {RETURN: f"self.scheduler.step()\n        {RETURN}"},
    ),
    Defect(
        "scheduler stepped twice, at the end of an epoch",
        CONTEXT,
        (r"step\(\) of ExponentialLR", "stepped twice", r"model_def.py:\d+"),
        {
            "self.best = Best()\n": "self.best = Best()\n        self.best.scheduler = self.scheduler\n",
            "    def on_validation_end": "    def on_training_epoch_end(self, epoch_idx):\n"
            "        self.scheduler.step()\n\n    def on_validation_end",
        },
    ),
    Defect(
        "scheduler wrapped twice",
        CONTEXT,
        (r"context.wrap_lr_scheduler\(\) is called twice with the same ExponentialLR",),
        {
            "        self.best = Best()\n": "        self.best = Best()\n"
            "        context.wrap_lr_scheduler(self.scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)\n"
        },
    ),
    Defect(
        "iterator that is kept",
        STATE,
        (r"trial \(MyTrial\): weights",),
        {
            HEAD: f"{HEAD}\n        self.weights = (1 + 0.1 * i for i in range(99))",
            **before_loss("pass", "self.loss(batch) * next(self.weights)"),
        },
    ),
    Defect(
        "callback without state",
        STATE,
        (r"callback 'best' \(Best\): best", "state_dict"),
        {
            'def state_dict(self):\n        return {"best": self.best}': "def state_dict(self):\n        return {}",
            'self.best = state_dict["best"]': "pass",
        },
    ),
    Defect(
        "state on the trial",
        STATE,
        (r"trial \(MyTrial\): seen", "keep it in a callback"),
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.seen = 0\n",
            **before_loss("self.seen += 1", "self.loss(batch) * (1 + 0.1 * self.seen)"),
        },
    ),
    Defect(
        "state in a list on the trial",
        STATE,
        (r"trial \(MyTrial\): history", "keep it in a callback"),
        {
            "        self.best = Best()\n": "        self.best = Best()\n        self.history = []\n",
            RETURN: f"self.history.append(float(loss))\n        {RETURN}",
        },
    ),
    Defect(
        "state in a global variable",
        STATE,
        ("module model_def", "STEPS"),
        before_loss("global STEPS\n        STEPS += 1", "self.loss(batch) * (1 + 0.1 * STEPS)"),
    ),
    Defect(
        "state on a class",
        STATE,
        ("class MyTrial", "factor"),
        before_loss("MyTrial.factor *= 0.9", "self.loss(batch) * MyTrial.factor"),
    ),
    Defect(
        "generator of its own",
        STATE,
        (r"trial \(MyTrial\): noise",),
        {
            HEAD: f"{HEAD}\n        self.noise = torch.Generator().manual_seed(1)",
            **before_loss("pass", "self.loss(batch) * (1 + torch.rand((), generator=self.noise))"),
        },
    ),
    Defect(
        "buffer that is not saved",
        STATE,
        (r"model trial.head", "count", "register_buffer"),
        {
            HEAD: f"{HEAD}\n        self.head.register_buffer('count', torch.zeros(()), persistent=False)",
            **before_loss("self.head.count += 1"),
        },
    ),
    Defect(
        "copy of the weights that is not saved",
        STATE,
        ("model trial.average", "weight"),
        {
            HEAD: f"{HEAD}\n        self.average = torch.optim.swa_utils.AveragedModel(self.head)",
            RETURN: f"self.average.update_parameters(self.head)\n        {RETURN}",
        },
    ),
    Defect(
        "callback that does not restore what it saved",
        ROUND_TRIP,
        ("callbacks.best.best", "saved after 7 batches", "load_state_dict"),
        {'self.best = state_dict["best"]': "pass"},
    ),
    Defect(
        "callback that counts its checkpoints",
        RESUMES,
        ("callback state best.saved", "on_checkpoint_write_end"),
        {
            "    def on_validation_end": "    saved = 0\n\n    def on_checkpoint_write_end(self, checkpoint_dir):\n"
            "        self.saved += 1\n\n    def on_validation_end",
            SAVED: '{"best": self.best, "saved": self.saved}\n\n    def load_state_dict',
            'self.best = state_dict["best"]': 'self.best, self.saved = state_dict["best"], state_dict["saved"]',
        },
    ),
    Defect(
        "objects of the trial's own classes in a checkpoint",
        ROUND_TRIP,
        ("refused when it is loaded", "model_def.Best", "trusted=True"),
        {SAVED: '{"best": self.best, "self": Best()}\n\n    def load_state_dict'},
    ),
    Defect(
        "state that is not there after a resume",
        STATE,
        ("trial .*: hidden",),
        before_loss(
            "if batch_idx == 0:\n            self.hidden = (torch.zeros(1),)\n"
            "        self.hidden = (self.hidden[0] + 1,)",
        ),
    ),
    Defect(
        "random draw without a seed",
        DETERMINISTIC,
        ("metric loss at batch 0", "apart", "default_rng"),
        before_loss("pass", "self.loss(batch) * (1 + np.random.default_rng().random())"),
    ),
    Defect(
        "order of the data without a seed",
        DETERMINISTIC,
        (r"data batch\[0\].* at batch 0", "not seeded"),
        {
            "        return len(self.inputs)": "        return len(self.inputs)\n\n    chance = random.Random()",
            "return self.inputs[index], ": "return self.inputs[self.chance.randrange(9)], ",
        },
    ),
    Defect(
        "extra random draw",
        REFERENCE,
        ("batch 0|batch 1", "random|metric|parameter|data"),
        before_loss("torch.rand(())"),
    ),
    Defect("loss summed", REFERENCE, ("'?loss'?", "batch 0"), {"** 2).mean()": "** 2).sum()"}),
    Defect(
        "loss summed, for two processes",
        PROCESSES,
        ("metric 'loss' of batch 0", "sum over the batch"),
        {"** 2).mean()": "** 2).sum()"},
    ),
    Defect(
        "scheduler of another mode",
        REFERENCE,
        ("learning rate", "batch 1"),
        {"STEP_EVERY_EPOCH": "STEP_EVERY_BATCH"},
    ),
    Defect(
        "another optimizer",
        REFERENCE,
        ("parameter|metric|weight", "batch [01]"),
        {"torch.optim.Adam": "torch.optim.AdamW"},
    ),
    Defect(".cuda()", DEVICE, (r"model_def.py:\d+: .*\.cuda\(\)", "wrap_model"), {HEAD: HEAD[:-1] + ".cuda())"}),
    Defect(
        "batch moved to a fixed device",
        DEVICE,
        (r"""model_def.py:\d+: inputs\.to\('cuda:0'\)""", "to_device"),
        {"inputs, targets = batch": "inputs, targets = batch\n        inputs = inputs.to('cuda:0')"},
    ),
    Defect(
        "GPUs chosen by the environment",
        DEVICE,
        (r"model_def.py:\d+: .*environ\['CUDA_VISIBLE_DEVICES'\]",),
        {"STEPS = 0": "import os\n\nSTEPS = 0\nos.environ['CUDA_VISIBLE_DEVICES'] = ''"},
    ),
    Defect(
        "process group of its own",
        GROUPS,
        (r"model_def.py:\d+: .*init_process_group", "context.distributed"),
        {HEAD: f"{HEAD}\n        torch.distributed.init_process_group('gloo')"},
    ),
    Defect(
        "sampler of its own for several processes",
        GROUPS,
        (r"model_def.py:\d+: .*DistributedSampler", "gives each process its part"),
        {"shuffle=True)": "sampler=torch.utils.data.distributed.DistributedSampler(Noted(40), 1, 0))"},
    ),
    Defect(
        "training metrics that change names",
        METRICS,
        (r"train_batch\(\)", "batch 3", "'third'"),
        {RETURN: 'return {"loss": loss, "third": 1.0} if batch_idx == 3 else {"loss": loss}'},
    ),
    Defect(
        "validation metrics that change names",
        METRICS,
        ("after 12 batches", "without 'validation_loss'", "'late'"),
        {
            EVALUATED: "late = self.context.current_train_batch() > 8\n"
            '        return {"late" if late else "validation_loss": self.loss(batch)}',
            'float(metrics["validation_loss"])': "0.0",
        },
    ),
    Defect(
        "metric that is no JSON",
        METRICS,
        ("'extra'", "object", "float"),
        {NEW_BEST: f'{NEW_BEST}\n        metrics["extra"] = object()'},
    ),
    Defect(
        "validation that fails",
        METRICS,
        ("ZeroDivisionError", r"model_def.py", "validation after 7 batches"),
        {EVALUATED: "return 1 / 0"},
    ),
    Defect(
        "loss that is no number",
        "trains",
        ("'loss' is nan", "batch 0"),
        {"** 2).mean()": "** 2).mean() * float('nan')"},
    ),
    Defect(
        "backward pass past the context",
        CONTEXT,
        (r"model_def.py:\d+: loss.backward\(\) should be context.backward\(loss\)",),
        {"self.context.backward(loss)": "loss.backward()"},
    ),
    Defect(
        "optimizer stepped past the context",
        CONTEXT,
        (r"model_def.py:\d+: step\(\) of SGD should be context.step_optimizer",),
        {"self.context.step_optimizer(self.sgd)": "self.sgd.step()\n        self.sgd.zero_grad()"},
    ),
    Defect(
        "optimizer stepped on every batch",
        AGGREGATION,
        ("batch 0 closes no update", "head.weight", "step_optimizer"),
        {"self.context.step_optimizer(self.sgd)": "self.sgd.step()"},
    ),
    Defect(
        "gradients cleared on every batch",
        AGGREGATION,
        (r"model_def.py:\d+: zero_grad\(\) of Adam", "clears gradients that an update still needs"),
        before_loss("self.adam.zero_grad()"),
    ),
    Defect(
        "layer that the loss does not use",
        MOVES,
        ("never get a gradient: body.2.weight, body.2.bias",),
        {
            "torch.nn.Dropout(0.1)))": "torch.nn.Dropout(0.1), torch.nn.Linear(4, 4)))",
            "self.head(self.body(inputs))": "self.head(self.body[1](self.body[0](inputs)))",
        },
    ),
    Defect(
        "parameters without an optimizer",
        MOVES,
        ("no wrapped optimizer has them: body.0.bias",),
        {"torch.optim.Adam(self.body.parameters()": "torch.optim.Adam([self.body[0].weight]"},
    ),
    Defect(
        "optimizer that is never stepped",
        MOVES,
        ("do not move: head.weight, head.bias", "step_optimizer"),
        {"        self.context.step_optimizer(self.sgd)\n": ""},
    ),
    Defect(
        "loader that cannot be resumed",
        RESUMES,
        ("data batch.* at batch 2", "not a det_lightning.pytorch.DataLoader"),
        {
            "        self.best = Best()\n": "        self.best = Best()\n"
            "        context.experimental.disable_dataset_reproducibility_checks()\n",
            "        return pytorch.DataLoader(Noted(40), "
            "batch_size=self.context.get_per_slot_batch_size(), shuffle=True)": "        "
            "data = torch.utils.data.TensorDataset(*map(torch.stack, zip(*Noted(40))))\n"
            "        batches = torch.utils.data.BatchSampler(range(40), 4, False)\n"
            "        batches = pytorch.samplers.RepeatBatchSampler(batches)\n"
            "        return torch.utils.data.DataLoader(data, batch_sampler=batches)",
        },
    ),
    Defect(
        "dataset with a memory",
        RESUMES,
        ("data batch.* at batch 2", "dataset"),
        {"return self.inputs[index], ": "self.reads += 1\n        return self.inputs[index] + 0.01 * self.reads, "},
    ),
]


def runs_of(source: str, folder: Path, **options: Any) -> TrialRuns:
    (folder / "model_def.py").write_text(source)
    return TrialRuns(TrialOptions("model_def:MyTrial", folder, HPARAMS, **options))


def run_check(name: str, runs: TrialRuns) -> None:
    (check,) = (check for check in CHECKS if check.name == name)
    check.run(runs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the correct trial."""
    folder = tmp_path_factory.mktemp("reference")
    runs = runs_of(CORRECT, folder)
    write_record(runs.own_record(), folder / "ref.json")
    return folder / "ref.json"


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> TrialRuns:
    return runs_of(CORRECT, tmp_path_factory.mktemp("correct"), reference=reference)


@pytest.mark.parametrize("check", dict.fromkeys(defect.check for defect in DEFECTS))
def test_the_correct_trial_passes_every_one_of_these_checks(correct: TrialRuns, check: str) -> None:
    run_check(check, correct)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_caught_by_its_check_and_named(defect: Defect, tmp_path: Path, reference: Path) -> None:
    runs = runs_of(defect.source(), tmp_path, reference=reference)
    with pytest.raises((CheckFailed, BadTrial)) as caught:
        run_check(defect.check, runs)
    runs.close()
    message = str(caught.value)
    assert all(re.search(pattern, message) for pattern in defect.says), message


HARMLESS = {
    "an optimizer that lets another one step": (
        CONTEXT,
        {
            "class MyTrial": "class Calling(torch.optim.SGD):\n    def step(self, closure=None):\n"
            "        torch.optim.SGD(self.param_groups[0]['params'], lr=0.1).step()\n\n\nclass MyTrial",
            "torch.optim.SGD(self.head": "Calling(self.head",
        },
    ),
    "what the clock changes": (
        STATE,
        before_loss("import time\n        self.spent = getattr(self, 'spent', 0) + time.perf_counter()"),
    ),
    "what is overwritten before it is read": (STATE, {RETURN: f"self.latest = loss.item()\n        {RETURN}"}),
    "a model that teaches another one": (
        MOVES,
        {
            HEAD: f"{HEAD}\n        self.teacher = context.wrap_model(torch.nn.Linear(3, 1))",
            **before_loss("with torch.no_grad():\n            self.teacher(batch[0])"),
        },
    ),
    "weights that a callback changes between batches": (
        AGGREGATION,
        {
            "self.best = Best()": "self.best = Best()\n        self.best.head = self.head",
            "    def on_validation_end": "    def on_validation_start(self):\n        self.head.reset_parameters()\n\n"
            "    def on_validation_end",
        },
    ),
    "what a callback adds to a checkpoint": (
        ROUND_TRIP,
        {
            "    def on_validation_end": "    def on_checkpoint_save_start(self, checkpoint):\n"
            "        checkpoint['added'] = 4\n\n    def on_checkpoint_load_start(self, checkpoint):\n"
            "        assert checkpoint['added'] == 4\n\n    def on_validation_end"
        },
    ),
    "a list of predictions for each validation": (
        STATE,
        {
            "    def on_validation_end": "    def on_validation_start(self):\n        self.seen = []\n\n"
            "    def on_validation_end",
            '        return {"validation_loss"': '        self.best.seen.append(1)\n        return {"validation_loss"',
        },
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_is_no_defect(name: str, tmp_path: Path) -> None:
    check, changes = HARMLESS[name]
    runs = runs_of(Defect(name, check, (), changes).source(), tmp_path)
    run_check(check, runs)
    runs.close()


def test_there_are_enough_defects() -> None:
    assert len(DEFECTS) >= 25
