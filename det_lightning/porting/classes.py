"""The trials and callbacks that a file defines."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from det_lightning.porting.syntax import PythonFile, dotted_name

__all__ = ["Definitions", "methods_of"]


# Trials of other frameworks, which train otherwise.
_OTHER_TRIALS = {"DeepSpeedTrial", "EstimatorTrial", "TFKerasTrial"}


class Definitions(cst.CSTVisitor):
    """Finds classes that derive from ``PyTorchTrial`` and ``PyTorchCallback``, also through others of the file.

    What derives from ``SomethingTrial`` of another module and defines ``train_batch`` is a trial too.

    Args:
        file: the file.

    Attributes:
        trials: the trials.
        callbacks: the callbacks.
    """

    def __init__(self, file: PythonFile) -> None:
        super().__init__()
        self._kinds = {"PyTorchTrial": "trial", "PyTorchCallback": "callback"}
        self.trials: list[cst.ClassDef] = []
        self.callbacks: list[cst.ClassDef] = []
        file.visit(self)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802 (a method of libcst's)
        bases = [dotted_name(base.value).rpartition(".")[2] for base in node.bases]
        kind = next((self._kinds[base] for base in bases if base in self._kinds), None)
        if kind is None and any(base.endswith("Trial") and base not in _OTHER_TRIALS for base in bases):
            kind = "trial" if any(method.name.value == "train_batch" for method in methods_of(node)) else None
        if kind is not None:
            self._kinds[node.name.value] = kind
            (self.trials if kind == "trial" else self.callbacks).append(node)


def methods_of(definition: cst.ClassDef) -> Iterator[cst.FunctionDef]:
    """Yield the methods that stand in the body of a class."""
    for statement in definition.body.body:
        if isinstance(statement, cst.FunctionDef):
            yield statement
