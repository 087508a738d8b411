"""What test_defects.py breaks the correct trial with: the kinds of change, and the checks that catch them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

CORRECT = Path(__file__).with_name("correct_trial.py").read_text()

CONTEXT = "trains through its context"
DEVICE = "uses no hard-coded device"
DETERMINISTIC = "is deterministic under a seed"
GROUPS = "has no process-group code of its own"
METRICS = "validates with JSON-serializable metrics of stable names"
MOVES = "moves every trainable parameter"
ANOTHER_PROCESS = "is deterministic in another process"
EQUAL_WEIGHTS = "two processes keep their weights equal"
GROWTH = "validation metrics do not grow with the batch"
PROCESSES = "two processes agree with one"
PROCESSES_VALIDATE = "two processes validate like one"
SAMPLES = "two processes train on the samples of one"
UNCHANGED = "is not changed by a validation"
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
        check: the one that must catch it.
        says: patterns in its message, in any order.
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
LAYERS = "torch.nn.Linear(3, 4), torch.nn.Dropout(0.1)"
BATCH_NORM = "torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)"
ADAM = 'torch.optim.Adam(self.body.parameters(), lr=context.get_hparam("lr"))'
SMALL_SGD = "torch.optim.SGD(self.body.parameters(), lr=0.001)"
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
