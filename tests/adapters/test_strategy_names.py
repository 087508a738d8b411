"""The names of the trial's strategies, wherever Lightning takes the name of a strategy."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from det_lightning import errors
from det_lightning.adapters.strategies import PerModelFSDPStrategy
from det_lightning.adapters.strategies.processes import find_counterpart
from tests.lightning import pl
from tests.versions import SHARDS, needs_shards
from tests.warm_python import start_warm_python

NAMES = ("trial_ddp", "trial_ddp_find_unused_parameters_true", "trial_fsdp", "horovod")

SCRIPT = f"""
from {pl.__name__}.cli import LightningCLI

from det_lightning.adapters import TrialModule

if __name__ == "__main__":
    cli = LightningCLI(TrialModule)
    module = cli.model
    print(cli.trainer.strategy.strategy_name, module.context.get_hparam("learning_rate"), flush=True)
    print(module.trial_run.state.batches_trained, "batches on", module.context.distributed.size, flush=True)
"""


def run(code: str, *arguments: str, directory: Path) -> str:
    (directory / "script.py").write_text(code)
    done = start_warm_python().run(directory / "script.py", *arguments, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["adapters", "adapters.module", "adapters.strategies.per_model"])
def test_imports_register_strategies(imported: str, tmp_path: Path) -> None:
    registry = f"from {pl.__name__}.strategies import StrategyRegistry\nprint(*StrategyRegistry)"
    assert set(NAMES) <= set(run(f"import det_lightning.{imported}\n{registry}", directory=tmp_path).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["trial_ddp", "{class_path: det_lightning.adapters.strategies.PerModelDDPStrategy}"]
)
def test_lightning_cli_takes_a_trial_and_a_strategy(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    flags = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    flags += ["--trainer.enable_checkpointing=false", "--model.trial=tests.trials.SmallTrial"]
    flags += ["--model.hparams={learning_rate: 0.5}", f"--trainer.strategy={strategy}"]
    printed = run(SCRIPT, "fit", *flags, directory=tmp_path)
    assert printed.count("trial_ddp 0.5") == 2
    assert printed.count("4 batches on 2") == 2


LINEAR: set[type[torch.nn.Module]] = {torch.nn.Linear}


@needs_shards
@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("DDP", {"ddp_comm_hook": print, "model_averaging_period": 3}, "ddp_comm_hook; model_averaging_period"),
        ("FSDP", {"auto_wrap_policy": lambda **_: True}, "auto_wrap_policy"),
        ("FSDP", {"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, "cpu_offload; sharding_strategy"),
        ("FSDP", {"activation_checkpointing_policy": LINEAR}, "activation_checkpointing"),
        ("FSDP", {"state_dict_type": "sharded", "limit_all_gathers": True}, "state_dict_type; limit_all_gathers"),
    ],
)
def test_unusable_options_are_named(kind: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(
        errors.UnsupportedTrainerFlags, match=rf"{kind}Strategy: {named}\. Leave .* PerModel{kind}Strategy"
    ):
        find_counterpart(getattr(pl.strategies, f"{kind}Strategy")(**options))


@needs_shards
def test_unknown_options_are_named() -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match="PerModelDDPStrategy does not take delay_all_reduce"):
        find_counterpart(pl.strategies.DDPStrategy(delay_all_reduce_named_params=[]))
    with pytest.raises(TypeError, match="PerModelFSDPStrategy does not take cpu_offload"):
        PerModelFSDPStrategy(cpu_offload=True)


@needs_shards
def test_strategies_have_counterparts() -> None:
    processes: dict[str, Any] = {"timeout": datetime.timedelta(seconds=5), "process_group_backend": "gloo"}
    by_layer = pl.strategies.FSDPStrategy(auto_wrap_policy=LINEAR, **processes)
    assert find_counterpart(by_layer).strategy_name == "trial_fsdp"
    assert find_counterpart(pl.strategies.DDPStrategy(find_unused_parameters=True)).strategy_name == "trial_ddp"


@pytest.mark.skipif(SHARDS, reason="this torch shards")
def test_sharding_by_an_old_torch_is_refused() -> None:
    with pytest.raises(errors.UnsupportedTrainerFlags, match=r"needs torch 2\.13.*trial_ddp"):
        pl.Trainer(strategy=PerModelFSDPStrategy.strategy_name, accelerator="cpu", devices=2)
