"""Changed copies of the correct trial, for ``test_defects.py``."""

from __future__ import annotations

import dataclasses
import difflib
import textwrap
from collections.abc import Callable
from pathlib import Path

CORRECT = Path(__file__).with_name("correct_trial.py").read_text()

#: The spots to change: a text replaces what stands between the bars; if that is nothing, the text is of statements.
SPOTS = {
    "above": "||STEPS = 0",
    "reads": "        ||return self.inputs[index]",
    "sample": "return |self.inputs[index]|, ",
    "remembers": '        ||self.best = float("inf")',
    "hook": "    ||def on_validation_end",
    "validated": "        ||self.best = min(",
    "best": 'self.best = |min(self.best, float(metrics["validation_loss"]))|',
    "saved": 'def state_dict(self):\n        return |{"best": self.best}|',
    "loads": '|self.best = state_dict["best"]|',
    "begins": "        ||self.best = Best()",
    "layers": "|torch.nn.Linear(3, 4), torch.nn.Dropout(0.1)|",
    "head": "self.head = |context.wrap_model(torch.nn.Linear(4, 1))|",
    "adam": '|torch.optim.Adam(self.body.parameters(), lr=context.get_hparam("lr"))|',
    "sgd": "|context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9))|",
    "scheduler": "|context.wrap_lr_scheduler(decay, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)|",
    "init": "        ||self.batch_size = ",
    "size": "self.batch_size = |context.get_per_slot_batch_size()|",
    "takes": "def build_training_data_loader(|self|)",
    "validation_loader": "return |pytorch.DataLoader(Noted(12), batch_size=4)|",
    "loader": "|pytorch.DataLoader(Noted(40), batch_size=self.batch_size, shuffle=True)|",
    "data": "DataLoader(|Noted(40)|",
    "batches": "|batch_size=self.batch_size, shuffle=True|",
    "validates": "Noted(12), |batch_size=4|",
    "methods": "    ||def loss(self, batch)",
    "prepares": "        ||return ((self.head",
    "outputs": "|self.head(self.body(inputs))|",
    "error": "return |((self.head(self.body(inputs)) - targets) ** 2).mean()|",
    "reduced": ".|mean()|",
    "first": "        ||loss = self.loss(batch)",
    "loss": "        loss = |self.loss(batch)|",
    "backward": "|self.context.backward(loss)|",
    "adam_step": "|self.context.step_optimizer(self.adam)|",
    "step": "|self.context.step_optimizer(self.sgd)|",
    "last": '        ||return {"loss"',
    "returned": 'return |{"loss": loss}|',
    "evaluation": "def |evaluate_batch(self, batch)|",
    "validation": '        ||return {"validation_loss"',
    "evaluated": 'return |{"validation_loss": self.loss(batch)}|',
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A changed trial; ``says`` are patterns in the message of the check, in any order, with LINE for its lines."""

    name: str
    says: tuple[str, ...]
    source: str

    def describe_changes(self) -> str:
        """Return the lines in which the trial differs from the correct one."""
        lines = difflib.unified_diff(
            CORRECT.splitlines(), self.source.splitlines(), "correct", self.name, n=1, lineterm=""
        )
        return "\n".join(lines)


def case(name: str, *says: str) -> Callable[..., Case]:
    """Return the function that makes a case from what comes to each spot."""
    patterns = tuple(pattern.replace("LINE", r"model_def\.py:\d+") for pattern in says)

    def make(**changes: str) -> Case:
        assert changes.keys() <= SPOTS.keys(), name
        source = CORRECT
        # An expression may be in what comes to the spot of the statements before.
        for spot in (spot for spot in SPOTS if spot in changes):
            source = change(source, spot, changes[spot])
        return Case(name, patterns, source)

    return make


def change(source: str, spot: str, text: str) -> str:
    before, old, after = SPOTS[spot].split("|")
    assert before + old + after in source, spot
    if not old:
        text = textwrap.indent(f"{text}\n", before).removeprefix(before) + before
    return source.replace(before + old + after, before + text + after)
