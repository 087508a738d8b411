"""Mistakes in an entrypoint or a metric are found in the code, before an experiment is made; doubts are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.config import read_config
from det_lightning.errors import ConfigError
from det_lightning.experiments.code_check import check_code

TRIAL = """
from det_lightning.pytorch import PyTorchTrial
class Digits(PyTorchTrial):
    def evaluate_batch(self, batch):
        return {"validation_loss": 0.5}
"""
ADDED = {
    "dict": "return {**self.metrics}",
    "variable": "return self.metrics",
    "reducer": "self.context.wrap_reducer(sum, name='accuracy'); return {'loss': 1}",
}
OTHERS = {
    "made": "globals()['Made'] = object",
    "inherited": "class Inherited(Digits): pass",
    "built": "if True:\n    Built = type('Built', (), {})",
    "imported": "from elsewhere import Imported",
    **{
        name: f"class {name.title()}(PyTorchTrial):\n    def evaluate_batch(self, batch): {body}"
        for name, body in ADDED.items()
    },
}


def check(entrypoint: str, metric: str = "validation_loss", variables: str = "") -> None:
    folder = Path("code")
    (folder / "models").mkdir(parents=True, exist_ok=True)
    (folder / "model_def.py").write_text(TRIAL)
    (folder / "models" / "deep.py").write_text(TRIAL)
    (folder / "broken.py").write_text("class Digits(PyTorchTrial)\n    pass\n")
    for name, text in OTHERS.items():
        (folder / f"{name}.py").write_text(TRIAL + text)
    config = f"entrypoint: {entrypoint}\nsearcher: {{name: single, metric: {metric}, max_length: {{batches: 1}}}}\n"
    check_code(read_config(f"{config}environment: {{environment_variables: [{variables}]}}\n"), folder, "const.yaml")


@pytest.mark.parametrize(
    ("entrypoint", "metric", "message"),
    [
        ("model_def", "loss", "line 1: entrypoint: model_def is not a command; did you mean model_def:Digits"),
        ("model_def.py", "loss", "For a script write python3 model_def.py"),
        ("model_def:Digit", "loss", "there is no Digit in model_def.py; did you mean Digits?"),
        ("modeldef:Digits", "loss", "there is no module modeldef in .*did you mean model_def?"),
        ("broken:Digits", "loss", r"broken.py:1 is not Python: expected ':': class Digits\(PyTorchTrial\)"),
        ("python3 -m determined.launch.torch_distributed --trial model_def:Digit", "loss", "there is no Digit"),
        (
            "model_def:Digits",
            "val_loss",
            r"line 2: searcher.metric: evaluate_batch\(\) at model_def.py:4 does not return val_loss; did you mean",
        ),
    ],
)
def test_mistake_is_named(entrypoint: str, metric: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^const.yaml: .*{message}"):
        check(entrypoint, metric)


@pytest.mark.parametrize(
    "entrypoint",
    [
        "model_def:Digits",
        "models.deep:Digits",
        "models/deep.py:Digits",
        "python3 model_def.py",
        "sh",
        "torch:Digits",
        *(f"{name}:{name.title()}" for name in OTHERS),
    ],
)
def test_what_the_source_does_not_tell_is_no_mistake(entrypoint: str) -> None:
    check(entrypoint, "validation_loss" if "Digits" in entrypoint else "accuracy")


def test_modules_may_be_elsewhere() -> None:
    check("modeldef:Digits", variables="PYTHONPATH=/models")
    Path("code", "startup-hook.sh").write_text("pip install modeldef")
    check("modeldef:Digits")
