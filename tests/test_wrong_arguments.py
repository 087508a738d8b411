"""An argument of the wrong kind is refused where it is passed, by its call, its value and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from det_lightning import adapters, experimental, pytorch
from det_lightning import callbacks as lightning_callbacks
from det_lightning import core as core_package
from det_lightning.adapters.strategies import PerModelDDPStrategy
from det_lightning.checkpoint import CheckpointReading
from det_lightning.hyperparameters import explain_texts
from det_lightning.pytorch.experimental import torch_batch_process
from tests.trials import SmallTrial

# Called with wrong arguments on purpose, so that their types are left out.
api: Any = pytorch
core: Any = core_package
trial_module: Any = adapters.TrialModule
reading: Any = CheckpointReading
callbacks: Any = lightning_callbacks
checkpoints: Any = callbacks.DeterminedCheckpoint
process_batches: Any = torch_batch_process
one_batch: Any = experimental.test_one_batch

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
RANK_0 = {"size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}
BY_BATCH = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH


class Largest(pytorch.MetricReducer):
    """No object of it is made."""


class NeedsASize(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, size: int) -> None:
        super().__init__(context)
        self.size = size


class LearnsAtItsRate(SmallTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        torch.optim.Adam(MODEL.parameters(), lr=context.get_hparam("lr"))


@pytest.fixture
def context() -> Iterator[pytorch.PyTorchTrialContext]:
    with pytorch.init(enable_tensorboard_logging=False) as opened:
        yield opened


def fit(context: pytorch.PyTorchTrialContext, **arguments: Any) -> None:
    trainer = pytorch.Trainer(SmallTrial(context), context)
    trainer.fit(**{"max_length": pytorch.Batch(1), "checkpoint_storage": "storage", **arguments})


Call = Callable[..., Any]
ON_A_CONTEXT: list[tuple[Call, str]] = [
    (lambda c: c.wrap_model(None), r"wrap_model\(\) takes a torch.nn.Module; got None"),
    (lambda c: c.wrap_model(torch.nn.Linear), "got the class Linear, not an object of the class"),
    (lambda c: c.wrap_model([MODEL, MODEL]), "of type list. Wrap each model by itself"),
    (lambda c: c.wrap_model(OPTIMIZER), "got an object of type SGD"),
    (lambda c: c.wrap_optimizer(torch.optim.SGD), "got the class SGD, not an object of the class"),
    (lambda c: c.wrap_optimizer(OPTIMIZER, "2"), r"backward_passes_per_step=...\) takes a number; got '2' of type"),
    (lambda c: c.wrap_lr_scheduler(BY_BATCH, object()), "in this order; got an object of type StepMode"),
    (lambda c: c.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR, BY_BATCH), "got the class StepLR"),
    (lambda c: c.wrap_reducer("loss", max), r"takes a name as a text; got an object of type builtin"),
    (lambda c: c.backward(None), r"context.backward\(\) takes the loss as a tensor with its graph; got None"),
    (lambda c: c.step_optimizer(OPTIMIZER, pytorch.ClipGradsL2Norm), "takes a function of the parameters; got <class"),
    (lambda c: api.Trainer(c, SmallTrial(c)), "got the context first.*Trainer\\(trial, context\\)"),
    (lambda c: api.Trainer(SmallTrial, c), "takes a PyTorchTrial; got the class SmallTrial.*Trainer\\(MyTrial\\(cont"),
    (lambda c: api.Trainer(SmallTrial(c), None), "takes a PyTorchTrialContext; got None.*with init"),
    (lambda c: api.Trainer(SmallTrial(c), c, callbacks=[callbacks.PreemptionHandler]), "the class PreemptionHandler"),
    (lambda c: api.Trainer(SmallTrial(c), c, callbacks=[pytorch.PyTorchCallback()]), r"by its build_callbacks\(\)"),
    (lambda c: api.Trainer(SmallTrial(c), c, callbacks={"a": pl.Callback()}), "callbacks of Lightning; got {'a'"),
    (lambda c: fit(c, trusted="no"), r"fit\(\) takes True or False; got trusted='no'"),
    (lambda c: fit(c, latest_checkpoint=5), "latest_checkpoint= takes.*got 5 of type int"),
    (lambda c: fit(c, checkpoints="."), r"fit\(checkpoints=...\) takes a DeterminedCheckpoint; got '.' of type str"),
    (
        lambda c: api.Trainer(SmallTrial(c), c, callbacks=[checkpoints("c", policy="all")]),
        r"of type DeterminedCheckpoint. Pass the callback that writes the checkpoints to fit\(checkpoints=...\)",
    ),
    (
        lambda c: trial_module(SmallTrial(c), {"a": 1}, context=c, trial_seed=3),
        r"does not take hparams, trial_seed: pass",
    ),
    (lambda c: trial_module(SmallTrial, context={}), r"TrialModule\(context=...\) takes the context of"),
]


@pytest.mark.parametrize(("call", "message"), ON_A_CONTEXT)
def test_call_with_a_context(context: pytorch.PyTorchTrialContext, call: Call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(context)


@pytest.mark.parametrize(
    ("reducer", "message"),
    [
        (Largest, r"got the class Largest, .*\(name='m'\). Create one first: wrap_reducer\(Largest\("),
        (pytorch.Reducer, "takes a function, a MetricReducer or a torchmetrics metric; got <enum 'Reducer'>"),
    ],
)
def test_reducer_is_an_object(context: pytorch.PyTorchTrialContext, reducer: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        context.wrap_reducer(reducer, name="m")
    assert context.wrap_reducer(list, name="values").fn is list


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"distributed": 2}, TypeError, r"init\(distributed=...\) takes a DistributedContext; got 2 of type int"),
        ({"distributed": core.DistributedContext}, TypeError, "got the class DistributedContext.*from_torch_distrib"),
        ({"aggregation_frequency": "2"}, TypeError, "aggregation_frequency takes a number.*got '2' of type str"),
        ({"trial_seed": "7"}, ValueError, r"trial_seed takes an integer from 0 to 2\*\*32 - 1; got '7' of type str"),
        ({"aggregation_frequency": 0}, ValueError, "aggregation_frequency must be a whole number, at least 1; got 0"),
        ({"tensorboard_path": 7}, TypeError, r"init\(tensorboard_path=...\) takes a path; got 7 of type int"),
        ({"enable_tensorboard_logging": "no"}, TypeError, "got enable_tensorboard_logging='no'"),
        ({"strategy": PerModelDDPStrategy}, ValueError, "strategy must be 'trial_ddp'.*got the class PerModelDDPStrat"),
        ({"strategy": "ddp"}, ValueError, "or a strategy of det_lightning.adapters.strategies; got 'ddp' of type str"),
    ],
)
def test_init_names_what_it_got(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), pytorch.init(**arguments):
        pass


def test_a_number_may_be_one_of_numpy() -> None:
    with pytorch.init(aggregation_frequency=np.int64(2), strategy=None) as context:
        assert (context.aggregation_frequency, context.distributed.size) == (2, 1)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: SmallTrial(api.init()), AttributeError, r"Write `with det.pytorch.init\(...\) as context:`"),
        (lambda: api.init().get_hparam, AttributeError, "'get_hparam' was used outside of a with statement"),
        (lambda: Path(core.init().checkpoint.restore_path("x")), TypeError, r"restore_path\(...\) as directory:`"),
        (lambda: [*core.init().checkpoint.store_path({})], TypeError, r"unpacked.*store_path\(...\) as \(directory"),
    ],
)
def test_a_missing_with_statement_is_named(use: Call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.Batch(1, 5, 10), r"Batch\(\) takes one value; got 3. Pass .* as a list: Batch\(\[1, 5, 10\]\)"),
        (lambda: trial_module(SmallTrial, validation_period=api.Batch("5")), r"whole numbers .*got Batch\('5'\)"),
        (lambda: trial_module(SmallTrial, aggregation_frequency="2"), "takes a number of batches; got '2' of type str"),
        (lambda: trial_module(SmallTrial, trial_kwargs=[3]), "trial_kwargs= takes a dict.*got \\[3\\] of type list"),
        (lambda: one_batch(torch.nn.Linear), r"test_one_batch\(\) takes the class of a trial.*got <class"),
        (lambda: one_batch(SmallTrial, "a.yaml"), "config=...\\) takes a dict; got 'a.yaml' of type str"),
        (lambda: process_batches(MODEL, [1]), "a subclass of TorchBatchProcessor; got an object of type Linear"),
        (lambda: api.CheckpointLoadContext("x"), "hparams= takes a dict; got 'x' of type str"),
        (lambda: api.PyTorchTrialContext.from_config("a.yaml"), r"from_config\(\) takes.*as a dict; got 'a.yaml'"),
        (lambda: api.DataLoader(None), r"DataLoader\(\) takes a dataset; got None"),
        (lambda: api.reset_parameters(torch.nn.Linear), r"reset_parameters\(\) takes a torch.nn.Module; got the class"),
        (lambda: core.init(distributed=3), r"core.init\(distributed=...\) takes a DistributedContext; got 3"),
        (lambda: core.DistributedContext(rank="0", **RANK_0), r"Context\(rank=...\) takes a whole number; got '0'"),
        (
            lambda: checkpoints("c", retention=3),
            r"retention=...\) takes a Retention, such as Retention\(trial_latest=3\); got 3 of type int",
        ),
        (
            lambda: checkpoints("c", period=5),
            r"period=...\) takes a Batch or an Epoch, .* got 5 of type int",
        ),
        (lambda: checkpoints("c", metric=5), r"metric=...\) takes the name of a metric; got 5"),
        (lambda: checkpoints("c", code_dir=5), r"code_dir=...\) takes the path of a directory; got 5"),
        (lambda: callbacks.DeterminedTensorBoard("runs"), r"TensorBoard\(\) takes context.tensorboard; got 'runs'"),
        (lambda: callbacks.TorchProfiler("runs"), r"TorchProfiler\(\) takes a torch.profiler.profile; got 'runs'"),
    ],
)
def test_other_calls_name_what_they_got(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


CORE: list[tuple[Call, type[Exception], str]] = [
    (lambda c: c.upload({"steps_completed": 1}, "."), TypeError, "path of a directory and the metadata, in this order"),
    (lambda c: c.upload(".", "x"), TypeError, "metadata= takes a dict; got 'x' of type str"),
    (lambda c: c.restore_path(5).__enter__(), TypeError, r"checkpoint.restore_path\(\) takes.*got 5"),
    (lambda c: c.download("x", "y", "one"), ValueError, r"takes a DownloadMode \(LocalWorkersShareDownload, NoShared"),
    (lambda _: core.init(preempt_mode="x"), ValueError, r"preempt_mode= takes a PreemptMode \(.*ChiefOnly.*got 'x'"),
    (lambda _: checkpoints("c", code_dir="no"), NotADirectoryError, r"takes the path of a directory; got 'no'"),
    (lambda _: callbacks.PreemptionHandler("USR1"), ValueError, r"signals=...\) takes a list of signals, .*got 'USR1'"),
]


@pytest.mark.parametrize(("call", "error", "message"), CORE)
def test_the_core_api_names_what_it_got(call: Call, error: type[Exception], message: str, tmp_path: Path) -> None:
    with core.init(checkpoint_storage=str(tmp_path)) as opened, pytest.raises(error, match=message):
        call(opened.checkpoint)


def test_a_length_is_not_negative(context: pytorch.PyTorchTrialContext) -> None:
    with pytest.raises(ValueError, match=r"max_length must not be negative; got Batch\(-3\). Pass the length of the"):
        fit(context, max_length=pytorch.Batch(-3))


def test_trial_arguments_go_into_trial_kwargs() -> None:
    message = r"NeedsASize\(context.*size.*without trial_kwargs=: missing.*'size'.*trial_kwargs"
    with pytest.raises(TypeError, match=message):
        predict(NeedsASize)
    with pytest.raises(TypeError, match=r"trial_kwargs=\{'sized': 3\}: missing a required argument: 'size'"):
        predict(NeedsASize, trial_kwargs={"sized": 3})
    with pytest.raises(TypeError, match=r"or define defaults"):
        one_batch(NeedsASize)


def predict(trial: Any, **arguments: Any) -> None:
    trainer = pl.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False, fast_dev_run=True)
    trainer.validate(trial_module(trial, **arguments), verbose=False)


@pytest.mark.parametrize("build", ["init", "TrialModule"])
def test_text_hyperparameter_is_named(build: str) -> None:
    hparams = {"lr": "1e-2x", "name": "small"}
    with pytest.raises(TypeError, match=r"'str'.*These hyperparameters are texts: lr='1e-2x'. Write numbers without"):
        if build == "TrialModule":
            predict(LearnsAtItsRate, hparams=hparams)
        with pytorch.init(hparams=hparams) as context:
            LearnsAtItsRate(context)


def test_error_is_explained_once() -> None:
    error = TypeError("unsupported operand type(s) for *: 'str' and 'float'")
    for _ in range(2):
        explain_texts(error, {"lr": "0.1"})
    assert str(error).count("These hyperparameters are texts: lr='0.1'.") == 1
    other = TypeError("missing 1 required positional argument: 'stride'")
    explain_texts(other, {"lr": "0.1"})
    assert str(other).endswith("'stride'")
    with pytest.raises(TypeError) as raised, pytorch.init(hparams={"lr": "0.1"}):
        raise TypeError("a number is too large")
    assert str(raised.value) == "a number is too large"


def test_a_trial_class_is_one(tmp_path: Path) -> None:
    for wrong in (torch.nn.Linear, MODEL, "model_def:MyTrial", adapters.TrialModule):
        with pytest.raises(TypeError, match=r"trial_class=...\) takes the class of a trial, a subclass of"):
            api.load_trial_from_checkpoint_path(tmp_path, trial_class=wrong)
