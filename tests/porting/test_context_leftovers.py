"""Each use of a context is gone from the module that is written of a trial, or a comment says that it is left."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize

import pytest

from det_lightning.core import DistributedContext
from det_lightning.porting.python_files import port_python
from det_lightning.porting.to_lightning import write_module
from det_lightning.pytorch import PyTorchTrialContext
from det_lightning.pytorch._experimental import PyTorchExperimentalContext

SOURCE = """\
import torch
from determined.pytorch import DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext
class Watching(PyTorchCallback):
    def __init__(self, context: PyTorchTrialContext):
        self.kept = context
    def on_training_start(self):
        {kept}
def function(context: PyTorchTrialContext):
    return context
def outside(context: PyTorchTrialContext):
    {outside}
class MyTrial(PyTorchTrial):
    def __init__(self, context):
        self.context = context
        {init}
    def own(self, context: PyTorchTrialContext):
        {own}
    def called_by_init(self):
        {called}
    def build_training_data_loader(self):
        {loader}
        return DataLoader([])
    def build_validation_data_loader(self):
        return DataLoader([])
    def train_batch(self, batch, epoch_idx, batch_idx):
        {train}
        return {{"loss": 1}}
    def evaluate_batch(self, batch):
        {evaluate}
        return {{"a": 1}}
"""
PLACES = ("kept", "outside", "init", "own", "called", "loader", "train", "evaluate")
FORMS = [
    "{}",
    "x = {}",
    "self.x = {}",
    "self.x, self.y = {}, 1",
    "print(f'{{{}}}', {})",
    "x = [{} for _ in range(2)]",
    "x = lambda parameters: {}",
    "if {}: self.x = 1; y = 2",
    "return {}",
    "x = {{'a': {}}}",
    "def inner(y=1):\n    return {}\nself.x = inner",
    "try:\n    self.x = {}\nexcept ValueError:\n    pass",
    "with torch.no_grad(): self.x = torch.ones({} + 1)",
    "while not {}: break",
]


def members(kind: type, part: str = "") -> list[str]:
    """Return calls of all public methods of a class, with as many arguments as they need, and its attributes."""
    calls = []
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or name == "from_config":
            continue
        parameters = list(inspect.signature(member).parameters.values())[1:] if callable(member) else []
        needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
        arguments = ", ".join("z" for parameter in needed if parameter.kind is not parameter.VAR_KEYWORD)
        calls.append(f"{part}{name}({arguments})" if callable(member) else f"{part}{name}")
    return calls


MEMBERS = [
    *members(PyTorchTrialContext),
    *members(DistributedContext, "distributed."),
    *members(PyTorchExperimentalContext, "experimental."),
    *("device", "models", "optimizers", "distributed.rank", "distributed.size", "distributed", "experimental"),
]


def contexts_without_comment(text: str) -> list[str]:
    """Return the lines of statements that name a context and have no comment above that is a TODO."""
    lines = text.split("\n")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    named = {token.start[0] for token in tokens if token.type == tokenize.NAME and token.string in ("context", "kept")}
    # In f-strings, which are one token before Python 3.12.
    named |= {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("context", "kept")
    }
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    found = []
    for number in sorted(named):
        innermost = max(node.lineno for node in statements if node.lineno <= number <= (node.end_lineno or 0))
        if not lines[innermost - 2].lstrip().startswith("# TODO: "):
            found.append(lines[number - 1])
    return found


def source_with(**parts: str) -> str:
    """Return a source with code at some places of a context, and ``pass`` at the others."""
    init = parts.pop("init", "pass")
    indented = {
        place: textwrap.indent(code, " " * (4 if place == "outside" else 8)).strip() for place, code in parts.items()
    }
    called = "self.called_by_init(); self.watching = Watching(context); self.own(context)"
    init = f"{textwrap.indent(init, ' ' * 8).strip()}\n        {called}"
    return SOURCE.format(**dict.fromkeys(PLACES, "pass") | indented | {"init": init})


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_use_of_a_context_is_marked(number: int) -> None:
    parts = {}
    for index, place in enumerate(PLACES):
        base = {"kept": "self.kept", "outside": "context", "own": "context"}.get(place, "self.context")
        call = MEMBERS[(number + index * len(FORMS)) % len(MEMBERS)]
        code = FORMS[number].replace("self.x", f"self.{place}_x").replace("{}", f"{base}.{call}")
        parts[place] = code.replace("{{", "{").replace("}}", "}")
    written = write_module(source_with(**parts)).text
    assert contexts_without_comment(written) == []
    assert port_python(written)[0] == written


@pytest.mark.parametrize("use", ["get_hparam(1)", "distributed.rank", "to_device(1)", "wrap_model(1)"])
def test_parameters_used_as_contexts_count(use: str) -> None:
    source = source_with().replace(
        "own(self, context: PyTorchTrialContext):\n        pass", f"own(self, context):\n        context.{use}"
    )
    written = write_module(source).text
    assert f"        context.{use}\n" in written
    assert contexts_without_comment(written) == []


def test_the_check_sees_what_is_left() -> None:
    text = "x = 1\nprint(f'{self.context.y}')\n# TODO: this\nprint(context)\n"
    assert contexts_without_comment(text) == ["print(f'{self.context.y}')"]
