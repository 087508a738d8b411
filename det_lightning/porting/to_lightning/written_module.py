"""What is written of a trial: the source, what is left to the user, and how to train with it."""

from __future__ import annotations

import dataclasses
import re

_HPARAM = re.compile(
    r"""self\.(?:trial_)?hparams(?:\[["'](\w+)["']\]|\.get\(["'](\w+)["']|\.(?!get\b|items\b|keys\b|values\b)(\w+))"""
)


@dataclasses.dataclass(frozen=True)
class Todo:
    """A comment that leaves something to the user."""

    line: int  # of the written file, from 1: the one that it is about
    text: str


@dataclasses.dataclass(frozen=True)
class WrittenModule:
    """The file of a trial as that of a LightningModule."""

    text: str
    name: str  # of the class
    todos: list[Todo]
    trainer_arguments: list[str]
    arguments: list[str]  # names of the class's own that have no default

    def program(self, module: str) -> str:
        """Return the source of a program that trains; ``module`` is the name to import the file by.

        What the file does not say is written as ``...``.
        """
        found = {name for match in _HPARAM.finditer(self.text) for name in match.groups() if name}
        given = ", ".join(f"{name}=..." for name in [*self.arguments, *sorted(found - set(self.arguments))])
        settings = ", ".join(["max_epochs=...", "num_sanity_val_steps=0", *self.trainer_arguments])
        return (
            f"import pytorch_lightning as pl\nfrom {module} import {self.name}\n\n"
            f"trainer = pl.Trainer({settings})\ntrainer.fit({self.name}({given}))\n"
        )


def find_todos(text: str, texts: list[str]) -> list[Todo]:
    """Return the comments of ``texts`` where they are in a written file."""
    found: list[Todo] = []
    waiting: list[str] = []
    comments = {f"# TODO: {todo}": todo for todo in texts}
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.strip() in comments:
            waiting.append(comments[line.strip()])
        else:
            found += [Todo(number, todo) for todo in waiting]
            waiting = []
    return found
