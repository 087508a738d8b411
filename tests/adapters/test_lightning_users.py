"""Each name on the page for Lightning users, beside a plain module; and the names beside Lightning's own signatures."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from packaging.version import Version

from det_lightning import errors
from det_lightning.adapters.strategies.processes import REPLACED_STRATEGIES, TRIAL_STRATEGIES, find_counterpart
from tests.adapters.training import Use, fit_only, loader, outcome
from tests.lightning import lightning_version, pl
from tests.versions import SHARDS

PAGE = Path(__file__).parents[2] / "docs" / "lightning-users.md"
IS_2_6 = Version(lightning_version) >= Version("2.6")


def rows(section: str) -> dict[str, str]:
    """Return the names in a section of the page: by name, the result."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    listed = "".join(re.findall(r"^\*\*works\*\*: (.*?)\n\n", text, re.MULTILINE | re.DOTALL))
    found = [(listed, "works"), *re.findall(r"^\| (`[^|]+`) \| (works|differs|refused) \| .*\|$", text, re.MULTILINE)]
    return {name: result for names, result in found for name in re.findall(r"`([^`]+)`", names)}


FLAGS, CALLBACKS = rows("Flags of pl.Trainer"), rows("Callbacks")
OUTPUTS, STRATEGIES = rows("Loggers and profilers"), rows("Strategies")
PRECISIONS, METHODS = rows("Precision"), rows("Hooks and methods of the module")


def require_rows(table: dict[str, str], names: set[str]) -> None:
    assert names - table.keys() == set(), "Lightning has what the page lacks"
    if IS_2_6:  # older releases lack some
        assert table.keys() - names == set(), "the page has what Lightning lacks"


def methods_of_modules() -> set[str]:
    bases = [base for base in pl.LightningModule.__mro__ if base.__module__.startswith(pl.__name__)]
    values = [item for base in bases for item in vars(base).items()]
    own = {name for name, value in values if callable(value) or "classmethod" in repr(value)}
    return {name for name in own if not name.startswith("_")} | {"forward", "state_dict", "load_state_dict"}


def test_every_name_has_a_row() -> None:
    require_rows(FLAGS, {*inspect.signature(pl.Trainer.__init__).parameters} - {"self"})
    classes = {name for name in dir(pl.callbacks) if inspect.isclass(getattr(pl.callbacks, name))}
    require_rows(CALLBACKS, {name for name in classes if issubclass(getattr(pl.callbacks, name), pl.Callback)})
    require_rows(OUTPUTS, {*pl.loggers.__all__, *pl.profilers.__all__} - {"Logger", "Profiler", "NeptuneLogger"})
    require_rows(METHODS, methods_of_modules())


def test_strategies_and_precisions_have_rows() -> None:
    trials = [known.strategy_name for known in TRIAL_STRATEGIES]
    assert [name for name in pl.strategies.StrategyRegistry if not name.startswith((*trials, *STRATEGIES))] == []
    given = inspect.signature(pl.Trainer.__init__).parameters["precision"].annotation
    precisions = {value for value in _literals(given) if isinstance(value, str) and not value.isdigit()} - {"bf16"}
    require_rows(PRECISIONS, precisions)


def _literals(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return {annotation} if not arguments else {one for argument in arguments for one in _literals(argument)}


@pytest.fixture(autouse=True)
def flags_of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what ``pl.Trainer(deterministic=True)`` and ``benchmark=True`` set for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def require_result(result: str, flags: Callable[[], dict[str, Any]], use: Use = fit_only, methods: Any = None) -> None:
    """Fail unless a trial's outcome stands to that of a plain module as a row says."""
    if result == "refused":
        refusals = (errors.UnsupportedTrainerFlags, errors.InvalidExperimentException, ValueError, ModuleNotFoundError)
        with pytest.raises(refusals):
            outcome(True, flags(), use, methods)
        return
    plain = outcome(False, flags(), use, methods)
    assert outcome(True, flags(), use, methods).is_like(plain) == (result == "works")


SWITCHES = (
    *("barebones", "benchmark", "detect_anomaly", "deterministic", "enable_checkpointing", "enable_model_summary"),
    *("enable_progress_bar", "logger", "sync_batchnorm"),
)
COUNTS = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "fast_dev_run", "limit_predict_batches"),
    *("limit_test_batches", "limit_val_batches", "max_epochs", "min_epochs", "num_sanity_val_steps", "overfit_batches"),
)
USES_OF_FLAGS: dict[str, dict[str, Any]] = {
    **{switch: {switch: True} for switch in SWITCHES},
    **{count: {count: 2} for count in COUNTS},
    "accelerator": {"accelerator": "auto"},
    "callbacks": {"callbacks": [pl.Callback()]},
    "default_root_dir": {"default_root_dir": "elsewhere"},
    "devices": {"devices": 1},
    "enable_autolog_hparams": {"enable_autolog_hparams": False},
    "gradient_clip_algorithm": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "gradient_clip_val": {"gradient_clip_val": 0.1},
    "inference_mode": {"inference_mode": False},
    "limit_train_batches": {"limit_train_batches": 3},
    "log_every_n_steps": {"log_every_n_steps": 1},
    "max_steps": {"max_steps": 9, "max_epochs": -1},
    "max_time": {"max_time": datetime.timedelta(0)},
    "min_steps": {"min_steps": 3},
    "model_registry": {"model_registry": None},
    "num_nodes": {"num_nodes": 1},
    "plugins": {"plugins": [pl.plugins.TorchCheckpointIO()]},
    "precision": {"precision": "bf16-mixed"},
    "profiler": {"profiler": "simple"},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "strategy": {"strategy": "single_device"},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "val_check_interval": {"val_check_interval": 3},
}
#: These differ with several ranks only.
OF_SEVERAL_RANKS = {"use_distributed_sampler"}


def test_and_predict(trainer: pl.Trainer, module: pl.LightningModule, notes: list[Any]) -> None:
    trainer.fit(module)
    notes.append([round(value, 4) for value in trainer.test(module, loader(), verbose=False)[0].values()])
    notes.append([prediction.shape for prediction in trainer.predict(module, loader()) or []])


test_and_predict.__test__ = False  # type: ignore[attr-defined]


def trained(flag: str) -> bool:
    return IS_2_6 or flag in inspect.signature(pl.Trainer.__init__).parameters


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if trained(flag)])
def test_flag_does_what_the_page_says(flag: str) -> None:
    result = "works" if flag in OF_SEVERAL_RANKS else FLAGS[flag]
    use = test_and_predict if flag in ("limit_test_batches", "limit_predict_batches") else fit_only
    require_result(result, lambda: dict(USES_OF_FLAGS[flag]), use)


USES_OF_CALLBACKS: dict[str, Callable[[], Any]] = {
    "BackboneFinetuning": lambda: pl.callbacks.BackboneFinetuning(),
    "BaseFinetuning": lambda: type("Finetuning", (pl.callbacks.BaseFinetuning,), {})(),
    "BasePredictionWriter": lambda: type("Writer", (pl.callbacks.BasePredictionWriter,), {})("epoch"),
    "EarlyStopping": lambda: pl.callbacks.EarlyStopping("validation_loss", patience=0, min_delta=2.0),
    "GradientAccumulationScheduler": lambda: pl.callbacks.GradientAccumulationScheduler({1: 2}),
    "LambdaCallback": lambda: pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, *rest: module.notes.append(trainer.global_step)
    ),
    "ModelCheckpoint": lambda: pl.callbacks.ModelCheckpoint("saved", monitor="validation_loss", save_last=True),
    "ModelPruning": lambda: pl.callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "OnExceptionCheckpoint": lambda: pl.callbacks.OnExceptionCheckpoint("saved"),
    "StochasticWeightAveraging": lambda: pl.callbacks.StochasticWeightAveraging(0.1),
    "ThroughputMonitor": lambda: pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
    "Timer": lambda: pl.callbacks.Timer(duration=datetime.timedelta(0)),
}


@pytest.mark.parametrize("name", [name for name in CALLBACKS if hasattr(pl.callbacks, name)])
def test_callback_does_what_the_page_says(name: str) -> None:
    if name == "ThroughputMonitor" and not IS_2_6:
        pytest.skip("with unequal batches, Lightning before 2.6 ends with an error")
    make = USES_OF_CALLBACKS.get(name, getattr(pl.callbacks, name))
    flags = {"enable_model_summary": "Summary" in name}
    require_result(CALLBACKS[name], lambda: {"callbacks": [make()], "logger": pl.loggers.CSVLogger("logs"), **flags})


USES_OF_OUTPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "AdvancedProfiler": lambda: {"profiler": pl.profilers.AdvancedProfiler("profiles", "profile")},
    "CSVLogger": lambda: {"logger": pl.loggers.CSVLogger("logs")},
    "PassThroughProfiler": lambda: {"profiler": pl.profilers.PassThroughProfiler()},
    "PyTorchProfiler": lambda: {"profiler": pl.profilers.PyTorchProfiler("profiles", "profile")},
    "SimpleProfiler": lambda: {"profiler": pl.profilers.SimpleProfiler()},
    "TensorBoardLogger": lambda: {"logger": pl.loggers.TensorBoardLogger("logs")},
    "XLAProfiler": lambda: {"profiler": pl.profilers.XLAProfiler()},
}


@pytest.mark.parametrize("name", USES_OF_OUTPUTS)
def test_logger_or_profiler_does_what_the_page_says(name: str) -> None:
    require_result(OUTPUTS[name], USES_OF_OUTPUTS[name])


def test_untested_loggers_say_so() -> None:
    said = re.findall(r"^\| (.*) \| works \| not tested.* \|$", PAGE.read_text(), re.MULTILINE)
    assert OUTPUTS.keys() - USES_OF_OUTPUTS.keys() == {*re.findall(r"`(\w+)`", "".join(said))}


@pytest.mark.parametrize("name", [name for name in STRATEGIES if SHARDS or name != "fsdp"])
def test_strategy_does_what_the_page_says(name: str) -> None:
    if name == "single_device":
        require_result(STRATEGIES[name], lambda: {"strategy": name})
        return
    known = pl.strategies.StrategyRegistry[name]
    result = "refused"
    if known["strategy"] in REPLACED_STRATEGIES:
        with contextlib.suppress(errors.UnsupportedTrainerFlags):
            find_counterpart(known["strategy"](**known["init_params"]))
            result = "works"
    assert STRATEGIES[name] == result


def test_subclasses_of_ddp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):  # which Lightning sets
        monkeypatch.setenv(name, "0")

    own = type("Own", (pl.strategies.DDPStrategy,), {})  # as that of DeepSpeed
    with pytest.raises(errors.UnsupportedTrainerFlags, match="strategy=Own"):
        outcome(True, {"strategy": own(), "devices": 1})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_does_what_the_page_says(precision: str) -> None:
    require_result(PRECISIONS[precision], lambda: {"precision": precision})


def in_hook(hook: str, use: Callable[..., Any]) -> dict[str, Any]:
    """Use the module in one of its hooks, and note the result."""
    return {"methods": {hook: lambda self, *arguments, **keywords: self.notes.append(use(self, *arguments))}}


def after_fit(use: Callable[[Any], Any]) -> dict[str, Any]:
    def run(trainer: pl.Trainer, module: pl.LightningModule, notes: list[Any]) -> None:
        trainer.fit(module)
        notes.append(use(module))

    return {"use": run}


def reload(module: Any) -> None:
    module.load_state_dict({name: torch.zeros_like(value) for name, value in module.state_dict().items()})


def clip(module: Any, optimizer: Any) -> None:
    module.clip_gradients(optimizer, 0.1, "norm")


def toggle(module: Any, *batch: Any) -> None:
    module.toggle_optimizer(module.optimizers())
    module.untoggle_optimizer(module.optimizers())


def freeze(trainer: pl.Trainer, module: pl.LightningModule, notes: list[Any]) -> None:
    module.freeze()
    try:
        trainer.fit(module)
    except RuntimeError:
        notes.append("nothing to train")


def overriding(method: str, override: Callable[..., Any]) -> dict[str, Any]:
    return {"methods": {method: override}}


def trace(module: Any) -> None:
    module.to_torchscript(method="trace", example_inputs=torch.ones(2, 4))


USES_OF_METHODS: dict[str, dict[str, Any]] = {
    "on_train_batch_start": overriding("on_train_batch_start", lambda self, _, index: -1 if index == 3 else None),
    "all_gather": in_hook("on_train_start", lambda self: self.all_gather(torch.ones(2)).tolist()),
    "clip_gradients": in_hook("on_before_optimizer_step", clip),
    "configure_callbacks": overriding("configure_callbacks", lambda self: [USES_OF_CALLBACKS["EarlyStopping"]()]),
    "configure_gradient_clipping": overriding(
        "configure_gradient_clipping", lambda self, optimizer, **flags: self.clip_gradients(optimizer, 0.05, "norm")
    ),
    "forward": after_fit(lambda module: module(torch.ones(2, 4)).shape),
    "freeze": {"use": freeze},
    "load_state_dict": after_fit(reload),
    "log": in_hook("on_train_epoch_end", lambda self: self.log("mine", 2.0)),
    "log_dict": in_hook("on_validation_epoch_end", lambda self: self.log_dict({"mine": 2.0})),
    "lr_schedulers": in_hook("on_train_start", lambda self: self.lr_schedulers()),
    "optimizers": in_hook("on_train_epoch_start", lambda self: self.optimizers().param_groups[0].update(lr=0.1)),
    "predict_step": {"use": test_and_predict},
    "print": in_hook("on_train_start", lambda self: self.print("begun")),
    "save_hyperparameters": in_hook("setup", lambda self: self.save_hyperparameters({"a": 1})),
    "state_dict": after_fit(lambda module: [value.shape for value in module.state_dict().values()]),
    "test_step": {"use": test_and_predict},
    "toggle_optimizer": in_hook("on_train_epoch_start", toggle),
    "untoggle_optimizer": in_hook("on_train_epoch_start", toggle),
    "to_torchscript": after_fit(trace),
    "unfreeze": after_fit(lambda module: module.unfreeze() and None),
}
#: Tested elsewhere, or not at all: these need other packages, or manual optimization.
OTHERS = {
    *("load_from_checkpoint", "manual_backward", "predict_dataloader", "remove_ignored_hparams", "test_dataloader"),
    *("to_onnx", "to_tensorrt", "toggled_optimizer"),
}


TESTED = [name for name in METHODS if name not in OTHERS and hasattr(pl.LightningModule, name)]
#: Overridden all at once, which Lightning does not take of configure_sharded_model.
WORKING_HOOKS = {name for name in TESTED if METHODS[name] == "works"} - {*USES_OF_METHODS, "configure_sharded_model"}


@pytest.mark.parametrize("name", [name for name in TESTED if name not in WORKING_HOOKS])
def test_method_does_what_the_page_says(name: str) -> None:
    uses = USES_OF_METHODS.get(name, {**in_hook(name, lambda self, *arguments: name), "use": test_and_predict})
    require_result(METHODS[name], dict, **uses)


def test_hooks_are_called_as_often() -> None:
    methods: dict[str, Any] = {}
    for hook in WORKING_HOOKS:
        methods |= in_hook(hook, lambda self, *arguments, hook=hook: hook)["methods"]
    plain, trial = (outcome(is_trial, {}, test_and_predict, methods) for is_trial in (False, True))
    assert sorted(map(str, trial.notes)) == sorted(map(str, plain.notes))
    assert trial.is_like(dataclasses.replace(plain, notes=trial.notes))
    assert {*map(str, plain.notes)} >= WORKING_HOOKS - {"on_load_checkpoint", "on_save_checkpoint"}


#: Where one is overridden, a step of Lightning is one batch.
OF_BATCHES = [f"on_{stage}_batch_{end}" for stage in ("train", "validation") for end in ("start", "end")]
OF_UPDATES = ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]


@pytest.mark.parametrize("hook", [*OF_BATCHES, *OF_UPDATES])
def test_hook_works_alone(hook: str) -> None:
    require_result("works", dict, **in_hook(hook, lambda self, *arguments: hook))
