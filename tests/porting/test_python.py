"""Python source: what is rewritten, what is left alone, what is a finding."""

from __future__ import annotations

import ast
import re
import textwrap

import hypothesis
import pytest
from hypothesis import strategies as st

from det_lightning.porting.findings import Severity
from det_lightning.porting.python_files import port_python


def ported(before: str) -> str:
    """Port once and again, which changes nothing more."""
    after, _ = port_python(textwrap.dedent(before))
    ast.parse(after)
    assert port_python(after)[0] == after
    return after


def findings_of(text: str, severity: Severity = Severity.problem) -> list[str]:
    _, findings = port_python(textwrap.dedent(text))
    return [f"{finding.line}: {finding.reason}" for finding in findings if finding.severity is severity]


#: What changes in most files.
OURS = {"determined": "det_lightning"}
IMPORTED = {"import determined": "import det_lightning"}
REQUIRED = {"determined": "det-lightning"}
LISTED = {"['determined']": "['det-lightning']"}
KEPT = {"import determined": "import det_lightning as determined"}


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ("import determined as det  # the platform", OURS),
        ("import os, determined.pytorch as p", OURS),
        ("import determined.pytorch\ndetermined.pytorch.DataLoader", OURS),
        ("from determined import pytorch, core as c", OURS),
        ("from determined.pytorch import *", OURS),
        ("if 1:\n\tfrom determined.pytorch import (  # a\n\t\tBatch,  # b\n\t\tEpoch,\n\t)", OURS),
        ("from determined.pytorch._data import DataLoader", {**OURS, "._data": ""}),
        ("from determined.core._context import Context as C", {**OURS, "._context": ""}),
        ("import determined as d\nd.core._tensorboard_mode.TensorboardMode.MANUAL", {**OURS, "_tensorboard_mode.": ""}),
        ("import determined.pytorch._data as d\nd.DataLoader", {**OURS, "._data": ""}),
        ("from determined.pytorch import _ShouldExit", {**OURS, "_Should": "ShouldExit as _Should"}),
        ("from determined.pytorch import experimental\nexperimental.torch_batch_process(A, b)", OURS),
        ("from determined.pytorch import _SimpleReducer", {**OURS, "pytorch": "pytorch._reducer"}),
        ("from determined import pytorch\nclass R(pytorch._SimpleReducer): ...", {**OURS, "._": "._reducer._"}),
        ("import determined as det\ndet._DistributedBackend().use_torch()", OURS),
        ("import importlib\nimportlib.import_module('determined.pytorch')", OURS),
        ("import determined\nname = 'determined'.upper()", IMPORTED),
        ("import logging\nlogging.getLogger('determined')\nlogging.getLogger('determined.common')", OURS),
        ("call(['-m', 'determined.launch.torch_distributed', 'train.py'])", OURS),
        ("call(['-m', 'determined.launch.autohorovod'])", {**OURS, "autohorovod'": "horovod', '--autohorovod'"}),
        ("setup(install_requires=['determined', 'torch'])", REQUIRED),
        ("R: list[str] = ['determined']\nsetup(install_requires=R + ['x'])\nX = ['determined', 1]", LISTED),
        ("from determined.__version__ import __version__ as v", {**OURS, ".__version__": ""}),
        ("from importlib import metadata\nmetadata.version('determined')", REQUIRED),
        ("from importlib_metadata import distribution\ndistribution('determined').version", REQUIRED),
        ("import determined\nversion('determined')", IMPORTED),
        ("try:\n    import determined\nexcept ImportError:\n    determined = None", KEPT),
        ("import determined\n__all__ = ['determined']", KEPT),
        ("def f():\n    global determined\n    import determined", KEPT),
        (
            "try:\n    import determined.pytorch\nexcept ImportError:\n    determined = None",
            {"import determined": "import det_lightning as determined, det_lightning"},
        ),
    ],
)
def test_names_and_imports_are_rewritten(before: str, changes: dict[str, str]) -> None:
    after = before
    for old, new in changes.items():
        after = after.replace(old, new)
    assert ported(f"{before}\n") == f"{after}\n"


def test_quoted_annotations_are_rewritten() -> None:
    text = """
        import @, @.pytorch as dp
        from typing import Annotated, List, Literal, cast
        def f(a: "@.pytorch.DataLoader", b: "List[@.InvalidHP]", c: "dp._data.DataLoader") -> "None":
            d: Literal["determined.pytorch"] = "determined.pytorch"
            e: Annotated["@.InvalidHP", "determined.InvalidHP"]
            return cast("@.pytorch.Batch", d)
        """
    before, after = (textwrap.dedent(text).replace("@", name) for name in ("determined", "det_lightning"))
    assert ported(before) == after.replace("dp._data", "dp")


def test_names_of_other_things_stay() -> None:
    text = """
        '''Uses determined.pytorch.'''
        import @
        def f(determined, det): return determined.pytorch, det.pytorch
        class A:
            determined = 1
        print("determined", [determined for determined in ()], f(determined=@.InvalidHP))  # determined
        """
    assert ported(text.replace("@", "determined")) == textwrap.dedent(text).replace("@", "det_lightning")


def test_missing_names_are_split_off() -> None:
    before = """
        from determined.pytorch import (
            DataLoader,  # of ours
            deepspeed,  # not
        )
        f(deepspeed)
        if True: from determined import pytorch, experimental; x = 1
        """
    after = ported(before)
    assert "from det_lightning.pytorch import (\n    DataLoader,  # of ours\n" in after
    assert "from determined.pytorch import (\n    deepspeed,  # not\n" in after
    assert "from det_lightning import pytorch; from determined import experimental; x = 1" in after
    assert findings_of(before) == [
        "4: determined.pytorch.deepspeed: DeepSpeedTrial is not covered",
        "7: determined.experimental: it talks to a Determined master",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("from determined import keras\nclass T(keras.TFKerasTrial): pass\n", "TensorFlow and Keras"),
        ("import determined.cli.cli\n", "talks to a Determined master"),
        ("importlib.import_module('determined.keras')\n", "TensorFlow and Keras"),
        ("from pedl.frameworks import pytorch\n", "before Determined was one"),
        ("from model_hub.mmdetection import MMDetTrial\n", "MMDetection are not covered"),
        ("from determined_cli.experiment import create\n", "determined_cli.experiment.create: it talks to a Determ"),
    ],
)
def test_other_frameworks_stay(text: str, reason: str) -> None:
    assert ported(text) == text
    assert reason in "".join(findings_of(text))


def test_missing_names_stay_findings() -> None:
    text = "import determined as det\nclass T(det.pytorch.PyTorchTrial): pass\ndet.core.run_prepare()\n"
    expected = ["3: determined.core.run_prepare: it is not in the public Core API of Determined 0.38"]
    assert findings_of(text) == findings_of(ported(text)) == expected


def test_unused_missing_names_go() -> None:
    before = """
        import os
        from determined.experimental import Determined  # of Determined
        from determined.pytorch import PyTorchTrial, deepspeed
        class T(PyTorchTrial): pass
        """
    assert (
        ported(before) == "\nimport os\nfrom det_lightning.pytorch import PyTorchTrial\nclass T(PyTorchTrial): pass\n"
    )
    assert [reason.rpartition(".")[2] for reason in findings_of(before, Severity.note)] == [
        "Determined is imported and not used; the import is removed",
        "deepspeed is imported and not used; the import is removed",
    ]
    assert findings_of(before) == []


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_missing_types_keep_nothing(test: str) -> None:
    before = f"""
        import determined as det
        if {test}:
            from determined.experimental.client import Experiment
            from determined.pytorch import PyTorchTrialContext
            import determined.keras as k
        def f(e: "Experiment", c: "PyTorchTrialContext", t: "k.TFKerasTrial"): det.core.init()
        """
    after = ported(before)
    assert "from determined.experimental.client import Experiment\n    from det_lightning.pytorch import" in after
    assert "import det_lightning as det\n" in after
    assert findings_of(before) == []
    notes = [note.partition(" is imported for type checkers only")[0] for note in findings_of(before, Severity.note)]
    assert notes == ["4: determined.experimental.client.Experiment", "6: determined.keras"]


def test_scripts_lose_unused_names() -> None:
    script = "import determined as det\n{}if __name__ == '__main__':\n    with det.core.init() as context: f(context)\n"
    before = script.format("from determined.pytorch import dsat\n")
    assert ported(before) == script.format("").replace("determined", "det_lightning")
    assert findings_of(before) == []


@pytest.mark.parametrize(
    "rest",
    ["core\n", "core\nfrom determined.pytorch import dsat\nif __name__ == '__main__':\n    client.login()\n"],
    ids=["another file may import it from here", "the script needs Determined for something else"],
)
def test_staying_files_keep_unused_imports(rest: str) -> None:
    text = f"from determined.experimental import client\nfrom determined import {rest}"
    assert ported(text) == text


def test_missing_names_move_to_the_script() -> None:
    before = """
        from determined import experimental, pytorch
        class T(pytorch.PyTorchTrial): pass
        if __name__ == "__main__":
            # trains
            experimental.create(T, {})
        """
    moved = textwrap.dedent(before).replace("# trains\n", "# trains\n    from determined import experimental\n")
    assert ported(before) == moved.replace("determined import experimental, ", "det_lightning import ")
    assert findings_of(before) == ["6: determined.experimental.create: Determined's Native API is gone since 0.18"]


@pytest.mark.parametrize("use", ["__all__ = ['Used']", "def f() -> 'Used': ...", "if x: Used()", "Used"])
def test_what_is_missing_and_used_stays(use: str) -> None:
    import_line = "from determined.experimental import Determined as Used\n"
    assert import_line in ported(f"{import_line}from determined.pytorch import PyTorchTrial\n{use}\n")


TRIAL = """
from determined.pytorch import PyTorchCallback, PyTorchTrial
class T(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = self.context.wrap_model(Model())
        self.optimizer = context.wrap_optimizer(Adam(self.model))
        {in_init}
    def train_batch(self, batch, epoch_idx, batch_idx):
        {in_train}
        return {{}}
    def evaluate_batch(self, batch):
        {in_eval}
        return {{}}
class C(PyTorchCallback):
    {hook}
"""


def trial(in_init: str = "pass", in_train: str = "pass", in_eval: str = "pass", hook: str = "pass") -> str:
    return TRIAL.format(in_init=in_init, in_train=in_train, in_eval=in_eval, hook=hook)


#: Statements of a trial's ``__init__``, and what they become.
OLD_CALLS = {
    "self.m = self.context.experimental.wrap_reducer(f)": "self.m = self.context.wrap_reducer(f)",
    "context._Model(m)": "context.wrap_model(m)",
    "context._LRScheduler(s, m)": "context.wrap_lr_scheduler(s, m)",
    "self.context.Model(m)": "self.context.wrap_model(m)",
    "context.LRScheduler(context.Optimizer(o))": "context.wrap_lr_scheduler(context.wrap_optimizer(o))",
    "f(context.get_rank())": "f(context.distributed.get_rank())",
    "self.many = self.context._hvd_config.use": "self.many = (self.context.distributed.get_size() > 1)",
    "if not context.distributed._hvd_config.use: f()": "if not (context.distributed.get_size() > 1): f()",
    "r = context.env.experiment_config.get('resources')": "r = context.get_experiment_config().get('resources')",
    "lr = self.context.env.hparams['lr']": "lr = self.context.get_hparams()['lr']",
    "f(self.context._epoch_len)": "f(self.context.position.epoch_len)",
    "f(self.context._should_communicate_and_update())": "f(self.context.is_update_batch())",
    "context._scaler = scaler": "context._scaler = scaler",
}


def test_old_names_of_the_context_are_rewritten() -> None:
    before, after = ("\n        ".join(calls) for calls in (OLD_CALLS, OLD_CALLS.values()))
    assert ported(trial(before)) == trial(after).replace("determined", "det_lightning")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def on_validation_step_end(self, metrics): ...", "def on_validation_end(self, metrics): ..."),
        ("def on_checkpoint_end(self, d): ...", "def on_checkpoint_write_end(self, d): ..."),
        ("def on_training_epoch_start(self): ...", "def on_training_epoch_start(self, epoch_idx: int): ..."),
        ("def on_training_epoch_end(self, e): ...", None),
        ("def on_checkpoint_end(self, d): super().on_checkpoint_end(d)", None),
    ],
)
def test_old_hooks_are_rewritten(before: str, after: str | None) -> None:
    assert ported(trial(hook=before)) == trial(hook=after or before).replace("determined", "det_lightning")


def test_unused_models_are_no_parameters() -> None:
    before = trial().replace("self, batch", "self, batch: Batch, model: nn.Module")
    assert ported(before) == trial().replace("self, batch", "self, batch: Batch").replace("determined", "det_lightning")


def test_needless_mode_calls_go() -> None:
    after = ported(trial(in_train="self.model.train()", in_eval="self.model.eval()  # as always"))
    assert ".train()" not in after
    assert ".eval()" not in after
    for needed in (
        trial(in_train="self.model.head.train()"),
        trial("self.model.train()", in_train="self.model.train()"),
    ):
        assert ported(needed) == needed.replace("determined", "det_lightning")


#: Statements of a trial's ``__init__``, and how the findings for them begin.
BYPASSES = {
    "self.model.cuda()": "a tensor or model is moved to a GPU by hand (.cuda())",
    "x.to('cuda:1')": "a device is named in the code (x.to('cuda:1'))",
    "torch.device('cuda' if torch.cuda.is_available() else 'cpu')": "a device is named in the code",
    "torch.zeros(1, device='cuda')": "a device is named in the code",
    "torch.cuda.set_device(0)": "a GPU is chosen by hand",
    "os.environ['CUDA_VISIBLE_DEVICES'] = '0'": "GPUs are chosen in the code",
    "torch.distributed.init_process_group('nccl')": "your own process group",
    "torch.utils.data.distributed.DistributedSampler(x)": "your own DistributedSampler",
    "nn.parallel.DistributedDataParallel(self.model)": "your own DistributedDataParallel",
    "nn.DataParallel(self.model)": "your own DataParallel",
    "import horovod.torch as hvd": "your own use of Horovod",
    "from apex import amp": "apex.amp is gone",
    "context.configure_apex_amp(m, o, num_losses=2)": "num_losses",
}


def test_bypasses_are_checks() -> None:
    text = trial("\n        ".join(BYPASSES))
    found = dict(one.split(": ", 1) for one in findings_of(text, Severity.check))
    for line, reason in enumerate(BYPASSES.values(), start=8):
        assert found.pop(str(line)).startswith(reason)
    assert found == {}
    assert findings_of(text) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (trial(in_train="loss.backward()"), "10: loss.backward() goes around the context"),
        (trial(in_train="self.optimizer.step()"), "10: self.optimizer.step() goes around the context"),
        (trial(in_train="self.optimizer.zero_grad()"), "10: self.optimizer.zero_grad() clears the gradients of an"),
        (trial(in_train="torch.nn.utils.clip_grad_norm_(p, 1)"), "10: clip_grad_norm_() clips before gradients are"),
        (trial(hook="def on_train_step_start(self, step_id): ..."), "16: on_train_step_start is not a hook"),
        ("from attrdict import AttrDict\n", "1: attrdict does not import on Python 3.10"),
        ("import model_hub.huggingface as hf\n", "1: model_hub.huggingface: model-hub is built on determined"),
    ],
)
def test_one_line_is_one_check(text: str, reason: str) -> None:
    (found,) = findings_of(text, Severity.check)
    assert found.startswith(reason)
    assert findings_of(text) == []


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run('pip install determined; python -c \"import determined\"', shell=True)",
        "subprocess.run([sys.executable, '-c', 'import determined.core'])",
        "run('python', '-c', 'import os, sys\\nimport determined')",
    ],
)
def test_programs_in_strings_are_named(start: str) -> None:
    assert findings_of(f"import os\n{start}\n") == ["2: a string with Python that imports determined"]


def test_called_methods_are_checked_too() -> None:
    methods = """
    def step(self, batch, clip):
        self.closure().backward()
        self.optimizer.step()
    def closure(self):
        self.optimizer.zero_grad()
    def clip(self, params):
        torch.nn.utils.clip_grad_norm_(params, 1)
    def pretrain(self):
        loss.backward()
    def sum(self, losses):
        losses.backward()"""
    text = trial(in_train="self.step(sum(batch), clip=lambda p: self.clip(p))").replace(
        "\nclass C", f"{methods}\nclass C"
    )
    assert [found.partition(" ")[2] for found in findings_of(text, Severity.check)] == [
        "a loss.backward() goes around the context",
        "self.optimizer.step() goes around the context",
        "self.optimizer.zero_grad() clears the gradients of an aggregation",
    ]


def test_version_checks_are_findings() -> None:
    text = """\
        import determined as det
        det.__version__ >= '0.20'
        version.parse(det.__version__) < version.parse('0.17')
        major, minor, _ = det.__version__.split('.')
        newest = version.parse(det.__version__)
        print(det.__version__)
        assert str(path).startswith(f'/runs/{det.__version__}')
        """
    reason = "a check of Determined's version, which is now det_lightning's"
    assert findings_of(text, Severity.check) == [f"{line}: {reason}" for line in (2, 3, 4, 5)]
    staying = "import determined as det\nfrom determined import keras\nkeras.TFKerasTrial, det.__version__ >= '0.2'\n"
    assert ported(staying) == staying
    assert findings_of(staying, Severity.check) == []


@pytest.mark.parametrize(
    "text",
    [
        trial("torch.device('cpu')"),
        trial("torch.cuda.is_available()"),
        trial(in_train="self.context.backward(loss)"),
        trial(in_train="self.scheduler.step()"),
        trial(in_train="self.context.step_optimizer(o, clip_grads=lambda p: torch.nn.utils.clip_grad_norm_(p, 1))"),
        trial(hook="def on_batch(self): ...\n    def on_training_start(self): self.on_batch()"),
        trial(in_train="dist = torch.distributions.Normal(x, 1)\n        z = dist.rsample()"),
        "dist.init_process_group('gloo')\ndet.core.DistributedContext.from_torch_distributed()\n",
    ],
)
def test_correct_code_has_no_findings(text: str) -> None:
    assert findings_of(text, Severity.check) == findings_of(text) == []


def test_loaders_of_torch_are_problems() -> None:
    loader = "def build_training_data_loader(self): return torch.utils.data.DataLoader(x)"
    before = "from determined.pytorch import PyTorchTrial\nclass T(PyTorchTrial):\n    "
    assert findings_of(before + loader)[0].startswith("3: torch's DataLoader is refused")
    disabled = "\n    def f(self): context.experimental.disable_dataset_reproducibility_checks()\n"
    assert findings_of(before + loader + disabled) == []
    renamed = (
        f"from torch.utils.data import DataLoader as Loader\n{before}{loader.replace('torch.utils.data.Data', '')}"
    )
    assert findings_of(renamed)[0].startswith("4: torch's DataLoader is refused")
    imported_later = renamed.replace("import PyTorchTrial", "import DataLoader as Loader, PyTorchTrial")
    assert findings_of(imported_later) == []


SCRIPT = """
from determined import get_cluster_info, pytorch
with pytorch.init() as context:
    {}
"""
#: Statements of a trial's ``__init__``, and the internal parts of the context in them.
INTERNAL = {
    "self.context._pbs_used": "context._pbs_used",
    "context.distributed._hvd_config.fp16": "context.distributed._hvd_config",
    "context.hvd_config.use = False": "context.hvd_config",
    "del context.env.hparams": "context.env",
    "context.env.experiment_config.scheduling_unit()": "context.env",
}


def test_internal_parts_of_the_context_are_problems() -> None:
    expected = [f"{line}: {part} is internal to Determined" for line, part in enumerate(INTERNAL.values(), start=8)]
    assert sorted(findings_of(trial("\n        ".join(INTERNAL)))) == sorted(expected)
    in_step = trial("det.get_cluster_info().latest_checkpoint", "self.context.env")
    assert findings_of(in_step) == ["10: context.env is internal to Determined"]


def test_used_models_are_problems() -> None:
    (found,) = findings_of(trial(in_train="loss = model(batch)").replace("self, batch,", "self, batch, model,"))
    assert found.startswith("9: train_batch() takes a model, but a trial that wraps")


def test_derived_trials_lose_the_model() -> None:
    before = """
        from determined.pytorch import PyTorchTrial
        class Base(PyTorchTrial):
            def __init__(self, context):
                self.model = context.Model(Net())
            def train_batch(self, batch, model: nn.Module, epoch_idx, batch_idx): ...
            def build_model(self): ...
        class Evaluated(Base):
            def evaluate_batch(self, batch, model): ...
        class Counting(Evaluated):
            def train_batch(self, batch, model, epoch_idx, batch_idx):
                return super().train_batch(batch, model, epoch_idx, batch_idx)
        class Named(Base):
            def train_batch(self, batch, model, epoch_idx, batch_idx):
                return super().train_batch(batch=batch, model=model, epoch_idx=epoch_idx, batch_idx=batch_idx)
        """
    after = re.sub(", model(: nn.Module|=model)?", "", textwrap.dedent(before)).replace(
        "context.Model", "context.wrap_model"
    )
    assert ported(before) == after.replace("determined", "det_lightning")
    assert findings_of(before) == []
    # A model that the trial builds is a parameter.
    built = before.replace("self.model = context.Model(Net())", "...").replace(
        "build_model(self): ...", "build_model(self): ...\n            def optimizer(self, model): ..."
    )
    assert ported(built) == textwrap.dedent(built).replace("determined", "det_lightning")


def test_trials_may_have_bases_elsewhere() -> None:
    text = """
        from determined.pytorch import PyTorchTrialContext
        from model_def import DigitsTrial
        class Failing(DigitsTrial):
            def train_batch(self, batch, epoch_idx, batch_idx):
                loss.backward()
        """
    assert findings_of(text, Severity.check) == ["6: loss.backward() goes around the context"]


@pytest.mark.parametrize(
    ("line", "lacks_length"),
    [
        ("trainer = pytorch.Trainer(t, context); trainer.fit(test_mode=True)", True),
        ("pytorch.Trainer(t, context).fit()", True),
        ("trainer = pytorch.Trainer(t, context); trainer.fit(max_length=pytorch.Epoch(1))", False),
        ("trainer = pl.Trainer(); trainer.fit(module)", False),
    ],
)
def test_missing_lengths_need_run(line: str, lacks_length: bool) -> None:
    found = [reason.partition(" max_length")[0] for reason in findings_of(SCRIPT.format(line), Severity.check)]
    assert found == (["4: fit() without"] if lacks_length else [])


def test_unknown_trainer_methods_are_problems() -> None:
    unknown = "Trainer has no method {}(), neither here nor in Determined"
    for call, name in (("pytorch.Trainer(t, c).run(1)", "run"), ("x = pytorch.Trainer(t, c); x.train()", "train")):
        assert findings_of(SCRIPT.format(call)) == [f"4: {unknown.format(name)}"]
    renamed = "import determined.pytorch as dp\ndp.Trainer(t, c).run(1)\n"
    assert findings_of(renamed) == [f"2: {unknown.format('run')}"]
    assert findings_of(SCRIPT.format("trainer = pl.Trainer(); trainer.train()")) == []
    for of in ("import lightning as L\nL.", "import lightning.pytorch\nlightning.", "from lightning import pytorch\n"):
        assert findings_of(f"import determined\n{of}pytorch.Trainer().test(module)\n") == []


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("info = get_cluster_info(); f(info.trial.hparams)", ["and the code needs info"]),
        ("info = get_cluster_info(); assert info is not None; f(info.trial)", ["and the code needs info"]),
        ("info = get_cluster_info(); f(info.trial.hparams if info is not None else {})", []),
        ("f(get_cluster_info().latest_checkpoint)", ["so .latest_checkpoint raises an AttributeError"]),
        ("from determined import get_cluster_info as get; i = get(); f(i.trial)", ["and the code needs i"]),
    ],
)
def test_cluster_info_needs_run(line: str, reported: list[str]) -> None:
    expected = [f"4: get_cluster_info() is None outside of det-lightning run, {reason}" for reason in reported]
    assert findings_of(SCRIPT.format(line), Severity.check) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("import torch.multiprocessing as mp; mp.spawn(f, nprocs=2)", "mp.spawn() starts processes of its own"),
        ("from torch.multiprocessing import spawn; spawn(f)", "spawn() starts processes of its own"),
        ("import multiprocessing as mp; mp.Process(target=f, args=(rank,))",
         "mp.Process() starts processes of its own"),
        ("p.add_argument('--local_rank', type=int)", "'--local_rank' is passed by torch.distributed.launch only"),
        ("import multiprocessing as mp; mp.Process(target=f, args=(queue,))", None),
        ("import multiprocessing as mp; mp.Pool(2)", None),
    ],
)  # fmt: skip
def test_own_processes_are_named(line: str, reason: str | None) -> None:
    text = f"import determined as det\nwith det.core.init() as core_context:\n    {line}\n"
    assert findings_of(text, Severity.check) == ([] if reason is None else [f"3: {reason}"])


def test_core_scripts_choose_devices() -> None:
    text = """\
        import torch
        import determined as det
        with det.core.init() as core_context:
            device = torch.device(f'cuda:{rank}')
            torch.cuda.set_device(0)
            model = torch.nn.parallel.DistributedDataParallel(model.cuda())
            sampler = torch.utils.data.DistributedSampler(data)
            x = torch.zeros(1, device='cuda')
        """
    found = findings_of(text, Severity.check)
    assert found == findings_of(ported(text), Severity.check)
    assert [one.partition(": ")[2].partition(": ")[0] for one in found] == ["needs a GPU"] * 4
    with_trainer = findings_of(text.replace("core.init", "pytorch.init"), Severity.check)
    assert {found.partition(":")[0] for found in with_trainer} == {"4", "5", "6", "7", "8"}


def test_core_scripts_have_no_findings() -> None:
    before = (
        "import determined as det\nwith det.core.init(preempt_mode=det.core.PreemptMode.ChiefOnly) as core_context:\n"
        "    for op in core_context.searcher.operations(): op.report_completed(0.5)\n"
    )
    assert ported(before) == before.replace("determined", "det_lightning")
    assert findings_of(before) == []


@pytest.mark.parametrize(
    ("use", "after", "internal"),
    [
        ("train._report_trial_metrics('eval', 3, m)", "train.report_metrics('eval', 3, m)", None),
        (
            "train._report_trial_metrics(group='eval', total_batches=3, metrics=m)",
            "train.report_metrics(group='eval', steps_completed=3, metrics=m)",
            None,
        ),
        ("train._report_trial_metrics('eval', 3, m, all)", None, "train._report_trial_metrics"),
        ("train._trial_id", None, "train._trial_id"),
        ("train.report_training_metrics(latest_batch=3)", "train.report_training_metrics(steps_completed=3)", None),
        ("train.__class__", None, None),
    ],
)
def test_private_core_names_are_rewritten(use: str, after: str | None, internal: str | None) -> None:
    before = f"import determined as det\nself.core_context = det.core.init()\nself.core_context.{use}\n"
    assert ported(before).splitlines()[2] == f"self.core_context.{after or use}"
    assert findings_of(before) == ([f"3: core_context.{internal} is internal to Determined"] if internal else [])


def test_the_chiefs_address_gets_advice() -> None:
    text = "from determined import core\ncore_context = core.init()\nip = core_context.distributed._chief_ip\n"
    (found,) = port_python(text)[1]
    assert found.advice == "ask get_cluster_info().container_addrs[0]"


@pytest.mark.parametrize(
    ("start", "severity"),
    [
        ("x = DistributedContext.from_deepspeed()", Severity.problem),
        ("if info is not None:\n    x = DistributedContext.from_deepspeed()", Severity.problem),
        ("def f():\n    if A:\n        return DistributedContext.from_deepspeed()\n    return None", Severity.check),
        ("if __name__ == '__main__':\n    x = DistributedContext.from_deepspeed() if A else None", Severity.check),
    ],
)
def test_only_deepspeed_is_a_problem(start: str, severity: Severity) -> None:
    (found,) = port_python(f"from determined.core import DistributedContext\n{start}\n")[1]
    assert found.severity is severity
    assert found.advice.startswith("write from_torch_distributed()")


def test_core_contexts_need_no_import() -> None:
    before = "def report(core_context, batch):\n    core_context.train.report_training_metrics(latest_batch=batch)\n"
    assert ported(before) == before.replace("latest_batch", "steps_completed")
    assert findings_of("def keep(core_context): core_context.checkpoint._storage_manager\n") != []
    assert findings_of("def other(core_context): core_context.settings._values\n") == []


FIRST_CORE_API = """\
import determined as det
def main(core_context, batch):
    core_context.train.report_training_metrics(latest_batch=batch, metrics={"x": 1})
    core_context.train.report_validation_metrics(metrics={"x": 1}, latest_batch=batch)
    metadata = {"latest_batch": batch}
    with core_context.checkpoint.store_path(metadata) as (path, uuid): path.touch()
    with core_context.checkpoint.store_path(metadata, shard=True) as (path, uuid): path.touch()
    core_context.checkpoint.upload("directory", {"kind": "last", "latest_batch": batch + 1})
    core_context.checkpoint.upload("directory", metadata={"latest_batch": batch, "steps_completed": batch})
    core_context.checkpoint.upload("directory", {"latest_batch": next(batch)})
    own.report_training_metrics(latest_batch=batch)
"""


def test_batch_counts_get_todays_name() -> None:
    expected = FIRST_CORE_API
    for before, now in (
        ("determined", "det_lightning"),
        ("training_metrics(latest_batch=batch, ", "training_metrics(steps_completed=batch, "),
        ('metrics={"x": 1}, latest_batch=', 'metrics={"x": 1}, steps_completed='),
        ('metadata = {"latest', 'metadata = {"steps_completed": batch, "latest'),
        ('{"kind"', '{"steps_completed": batch + 1, "kind"'),
    ):
        expected = expected.replace(before, now)
    assert ported(FIRST_CORE_API) == expected


def lines(template: str, *words: list[str]) -> st.SearchStrategy[str]:
    return st.builds(template.format, *map(st.sampled_from, words))


NAMES = ["determined", "det", "determined.pytorch", "determined.core", "os", "a", "p"]
IMPORTED_NAMES = ["pytorch", "DataLoader as p", "core, nothing", "(Batch,\n    deepspeed,)", "*"]
PROGRAM_LINES = st.one_of(
    lines("import {}", ["determined", "determined.pytorch", "determined.common.api", "os"]),
    lines("import {} as {}", ["determined", "determined.pytorch._data"], ["det", "p"]),
    lines("from determined{} import {}", ["", ".pytorch", ".pytorch._reducer"], IMPORTED_NAMES),
    lines("from .determined import {}", IMPORTED_NAMES),
    lines("x = {}.{}", NAMES, ["pytorch.DataLoader", "pytorch._data.DataLoader.x", "core.init"]),
    lines("def f({}=1, *, y: '{}.pytorch.Batch'): return {}.x", ["a", "det", "determined"], NAMES, NAMES),
    lines("{} = None", ["det", "determined", "p", "det_lightning"]),
    lines("class C: {}", ["determined = 1", "x = determined.pytorch", "import determined"]),
    lines(
        "def g():\n    {}", ["global determined; determined = 1", "import determined; determined.x", "del determined"]
    ),
    st.builds("s = {!r}".format, st.text(alphabet="determined.ptorch \n'\"#-m", max_size=30)),
)


@pytest.mark.slow
@hypothesis.given(st.lists(PROGRAM_LINES, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_any_program_stays_valid(written: list[str], newline: str) -> None:
    before = "".join(line + "\n" for line in written).replace("\n", newline)
    try:
        ast.parse(before)
    except SyntaxError:
        hypothesis.reject()
    after, _ = port_python(before)
    ast.parse(after)
    assert port_python(after)[0] == after
    assert after.count(newline) - before.count(newline) == after.count("\n") - before.count("\n")
    if "determined" not in before:
        assert after == before
