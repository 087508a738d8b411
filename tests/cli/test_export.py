"""``det-lightning checkpoint export``: all of a storage, and a file for a colleague who has only Lightning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from det_lightning import import_from_path, pytorch
from det_lightning.cli.app import app
from tests.checkpoint.made_checkpoints import write_checkpoint

TRIAL = """
import torch
from det_lightning import pytorch


class PairTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.encoder = context.wrap_model(torch.nn.Linear(4, context.get_hparam("width")))
        self.decoder = context.wrap_model(torch.nn.Linear(context.get_hparam("width"), 4))
        self.loss = torch.nn.MSELoss()
        parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(parameters, lr=0.05))

    def build_training_data_loader(self):
        data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
        return pytorch.DataLoader(data, batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.loss(self.decoder(self.encoder(batch[0])), batch[0])}
"""
SMALL = """
import pytorch_lightning as pl


class Strict(pl.LightningModule):
    def __init__(self, depth):
        super().__init__()


class Small(pl.LightningModule):
    def __init__(self, **hparams):
        super().__init__()
"""
# Runs a program where neither package can be imported, and says what the module then has.
ALONE = """
import sys
sys.modules["det_lightning"] = sys.modules["determined"] = None
exec(sys.stdin.read())
print("STEPS", [int(state["step"]) for state in module.optimizers().state.values()])
"""


def run(*arguments: object, ends_with: int = 0) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == ends_with, result.output
    return result


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of eight batches in the working directory, next to the trial and the module written from it."""
    monkeypatch.chdir(tmp_path)
    Path("model_def.py").write_text(TRIAL)
    with import_from_path("."), pytorch.init(hparams={"global_batch_size": 8, "width": 3}) as context:
        import model_def  # type: ignore[import-not-found]

        trainer = pytorch.Trainer(model_def.PairTrial(context), context)
        trainer.fit(max_length=pytorch.Batch(8), checkpoint_storage="checkpoints")
    run("port", "--to", "lightning", "model_def.py", "-o", "module.py")
    (checkpoint,) = Path("checkpoints").iterdir()
    return checkpoint


@pytest.mark.slow
def test_colleague_goes_on_with_lightning_alone(trained: Path, tmp_path: Path) -> None:
    exported = run(
        "checkpoint", "export", trained, "--to", "lightning", "--module", "module.py:PairModule", "-o", "a.ckpt"
    )
    weights = torch.load("a.ckpt", weights_only=True)["state_dict"]
    assert list(weights) == ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"]
    colleague = tmp_path / "colleague"
    colleague.mkdir()
    for name in ("a.ckpt", "module.py"):
        Path(name).rename(colleague / name)
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, input=exported.stderr, cwd=colleague, capture_output=True, text=True, check=False)
    # The optimizer had made 8 steps, and makes the 4 of one more epoch.
    assert "STEPS [12, 12, 12, 12]" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("module.py:OtherModule", "has no class OtherModule"),
        ("missing.py:PairModule", "there is no file missing.py"),
        ("module", "--module takes FILE:CLASS"),
        ("small.py:Strict", "Strict does not take the trial's hyperparameters"),
        ("small.py:Small", "Small has no part with the weights of model 0: bias, weight."),
    ],
)
def test_module_that_does_not_fit_is_named(module: str, message: str, trained: Path) -> None:
    Path("small.py").write_text(SMALL)
    options = ["--to", "lightning", "--module", module, "-o", "a.ckpt"]
    result = CliRunner().invoke(app, ["checkpoint", "export", str(trained), *options])
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not Path("a.ckpt").exists()


def test_all_of_a_storage_is_exported_once(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / "storage") for _ in range(2))
    (second / "state_dict.pth").write_bytes(b"damaged")
    arguments = ("checkpoint", "export", tmp_path / "storage", "--all", "--to", "weights", "-o", tmp_path / "out")
    result = run(*arguments, ends_with=1)
    assert result.stdout == f"1 exported, 0 already there, 1 failed, in {tmp_path / 'out'}\n"
    assert f"{second.name}: " in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{first.name}.pt"]
    summary = json.loads(run(*arguments, "--json", ends_with=1).stdout)
    assert (summary["already_there"], summary["failed"]) == ([first.name], [second.name])
