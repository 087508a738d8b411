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
from tests.checkpoint.made_checkpoints import make_state, write_checkpoint

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


@pytest.mark.slow
def test_colleague_goes_on_with_lightning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("model_def.py").write_text(TRIAL)
    with import_from_path("."), pytorch.init(hparams={"global_batch_size": 8, "width": 3}) as context:
        import model_def  # type: ignore[import-not-found]

        trainer = pytorch.Trainer(model_def.PairTrial(context), context)
        trainer.fit(max_length=pytorch.Batch(8), checkpoint_storage=tmp_path / "checkpoints")
    run("port", "--to", "lightning", "model_def.py", "-o", tmp_path / "module.py")
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    monkeypatch.chdir(tmp_path)
    exported = export("lightning", checkpoint, "--module", "module.py:PairModule", "-o", "a.ckpt")
    weights = torch.load("a.ckpt", weights_only=True)["state_dict"]
    assert list(weights) == ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"]
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, input=exported.stderr, capture_output=True, text=True, check=False)
    # The optimizer had made 8 steps, and makes the 4 of one more epoch.
    assert "STEPS [12, 12, 12, 12]" in done.stdout, done.stderr


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
    assert summary["left_out"] == {}


# The models of write_checkpoint() in several modules.
PARTS = """
import copy
import pytorch_lightning as pl
import torch
def build_body():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 1)
        self.body = build_body()
class Aliases(Plain):
    def __init__(self):
        super().__init__()
        self.same = self.body
        self.wrapped = torch.nn.Sequential(self.head)
        self.first = self.body[0]
class Target(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = build_body()
        self.target = torch.nn.Linear(3, 1)
        self.head = copy.deepcopy(self.target)
class Broken(Plain):
    def __init__(self, **hparams):
        super().__init__()
        hparams["width"]
class Picky(Plain):
    def __init__(self, width): super().__init__()
class Ending(Plain):
    def __init__(self): raise SystemExit(0)
class Bare(torch.nn.Module): pass
number = 3
"""


def export(to: str, *more: object, ends_with: int = 0) -> Result:
    return run("checkpoint", "export", *more, "--to", to, ends_with=ends_with)


@pytest.fixture
def checkpoint() -> Path:
    """A checkpoint in the storage of the working directory, and a file with modules."""
    Path("parts.py").write_text(PARTS)
    return write_checkpoint("storage")


@pytest.mark.parametrize("name", ["Plain", "Aliases"])
def test_weights_reach_all_names(name: str, checkpoint: Path) -> None:
    export("lightning", checkpoint, "--module", f"parts.py:{name}", "-o", "a.ckpt")
    weights = torch.load("a.ckpt", weights_only=True)["state_dict"]
    body, head = make_state()["models_state_dict"]
    expected = {"head": head, "body": body}
    if name == "Aliases":
        first = {key.removeprefix("0."): value for key, value in body.items() if key.startswith("0.")}
        expected |= {"same": body, "wrapped.0": head, "first": first}
    assert {f"{part}.{key}" for part, model in expected.items() for key in model} == set(weights)
    for part, model in expected.items():
        assert all(torch.equal(weights[f"{part}.{key}"], value) for key, value in model.items())


def test_ambiguous_part_is_refused(checkpoint: Path) -> None:
    result = export("lightning", checkpoint, "--module", "parts.py:Target", "-o", "a.ckpt", ends_with=1)
    assert "Target has 2 parts that fit the weights of model 1: bias, weight." in result.stderr
    assert "target, head" in result.stderr
    assert "--to weights" in result.stderr
    assert not Path("a.ckpt").exists()
    # The order of equal models proves nothing.
    state = make_state()
    head = state["models_state_dict"][1]
    equal = write_checkpoint("equal", state={**state, "models_state_dict": [head, {}, head]})
    said_of = {"Target": "2 parts that fit the weights of model 0", "Plain": "no part with the weights of model 2"}
    for name, said in said_of.items():
        result = export("lightning", equal, "--module", f"parts.py:{name}", "-o", "a.ckpt", ends_with=1)
        assert f"{name} has {said}" in result.stderr


@pytest.mark.parametrize(
    ("file", "text", "name", "message"),
    [
        ("absent.py", "import there_is_no_such_module", "Plain", "ModuleNotFoundError: No module named"),
        ("wrong.py", "def f(:", "Plain", "SyntaxError: "),
        ("ends.py", "raise SystemExit(0)", "Plain", "SystemExit: 0"),
        ("parts.py", PARTS, "Broken", "KeyError: 'width'"),
        ("parts.py", PARTS, "Picky", "Picky does not take the trial's hyperparameters"),
        ("parts.py", PARTS, "Ending", "SystemExit: 0"),
        ("parts.py", PARTS, "Bare", "Bare is not the class of a LightningModule"),
        ("parts.py", PARTS, "number", "number is not the class of a LightningModule"),
        ("class.py", PARTS, "Plain", "no program can import class.py; rename it"),
    ],
)
@pytest.mark.parametrize("of", ["one", "all"])
def test_unusable_module_is_one_line(of: str, file: str, text: str, name: str, message: str, checkpoint: Path) -> None:
    Path(file).write_text(text)
    what = (checkpoint.parent, "--all") if of == "all" else (checkpoint,)
    is_of_checkpoint = of == "all" and name in ("Broken", "Picky", "Ending")
    ends_with = 1 if is_of_checkpoint else 2
    result = export("lightning", *what, "--module", f"{file}:{name}", "-o", "out", ends_with=ends_with)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{checkpoint.name}: " if is_of_checkpoint else f"Error: --module {file}:{name}: ")
    assert message in line


def test_module_is_a_class_in_a_file(checkpoint: Path) -> None:
    said_of = {"module": "--module takes FILE:CLASS", "missing.py:Plain": "there is no file missing.py"}
    for module, said in {**said_of, "parts.py:Other": "has no class Other"}.items():
        assert said in export("lightning", checkpoint, "--module", module, "-o", "a.ckpt", ends_with=2).stderr


def test_file_named_like_another_module(checkpoint: Path) -> None:
    Path("modules").mkdir()
    Path("parts.py").rename("modules/json.py")
    result = export("lightning", checkpoint, "--module", "modules/json.py:Plain", "-o", "a.ckpt")
    assert "from json import Plain" in result.stderr


@pytest.mark.parametrize("output", ["s3://bucket/out", "~nobody_of_this_name/out", "parts.py/"])
def test_unusable_output_is_refused(output: str, checkpoint: Path) -> None:
    before = sorted(Path().iterdir())
    for what in ((checkpoint.parent, "--all"), (checkpoint,)):
        result = export("weights", *what, "-o", output, ends_with=2)
        assert len(result.stderr.splitlines()) == 1
    assert sorted(Path().iterdir()) == before


def test_all_names_omitted_entries(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here into a directory in the home."""
    weights = {"weight": torch.ones(2), "_extra_state": {"a": 1}}
    other = write_checkpoint("storage", state={**make_state(), "models_state_dict": [weights]})
    monkeypatch.setenv("HOME", str(tmp_path))
    result = export("safetensors", "storage", "--all", "-o", "~/out", "--json")
    names = {f"{one}.safetensors" for one in (checkpoint.name, other.name)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert json.loads(result.stdout)["left_out"] == {other.name: ["_extra_state"]}
    assert result.stderr == f"{other.name}: Left out, since they are not tensors: _extra_state\n"


def test_only_whole_files_of_the_kind_are_there(checkpoint: Path) -> None:
    Path("out").mkdir()
    empty = Path(f"out/{checkpoint.name}.ckpt")
    empty.touch()
    arguments = ("storage", "--all", "-o", "out", "--json")
    assert json.loads(export("lightning", *arguments).stdout)["exported"] == [checkpoint.name]
    assert empty.stat().st_size > 0
    module = ("--module", "parts.py:Plain")
    assert json.loads(export("lightning", *arguments, *module).stdout)["exported"] == [checkpoint.name]
    assert json.loads(export("lightning", *arguments, *module).stdout)["already_there"] == [checkpoint.name]
    assert {path.name for path in Path("out").iterdir()} == {empty.name, f"{checkpoint.name}.Plain.ckpt"}


@pytest.mark.parametrize("kind", ["weights", "safetensors", "lightning"])
def test_foreign_file_is_no_export(kind: str, checkpoint: Path) -> None:
    arguments = ("storage", "--all", "-o", "out", "--json")
    export(kind, *arguments)
    assert json.loads(export(kind, *arguments).stdout)["already_there"] == [checkpoint.name]
    (file,) = Path("out").iterdir()
    file.write_text("of another program")
    refused = export(kind, *arguments, ends_with=1)
    assert json.loads(refused.stdout)["failed"] == [checkpoint.name]
    assert f"{file} is not the export of a checkpoint; --force replaces it." in refused.stderr
    assert json.loads(export(kind, *arguments, "--force").stdout)["exported"] == [checkpoint.name]
