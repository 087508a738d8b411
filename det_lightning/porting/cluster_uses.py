"""What a training script took from the cluster that ran it, and has to say itself now."""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m

from det_lightning.porting.findings import Severity
from det_lightning.porting.python_syntax import PythonFile, dotted_name

_INSTEAD = 'take hparams from your own configuration; latest_checkpoint="last" resumes from the newest one'


class ClusterUses(cst.CSTVisitor):
    """Notes where a script relies on a Determined master.

    Args:
        file: the file; it uses the PyTorch API.
        trainer_names: the names that stand for Determined's ``Trainer``, beside ``pytorch.Trainer``.
    """

    def __init__(self, file: PythonFile, trainer_names: set[str]) -> None:
        super().__init__()
        self._file = file
        self._trainer_names = trainer_names
        self._trainers: set[str] = set()
        file.visit(self)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 (a method of libcst's)
        called = dotted_name(node.value.func) if isinstance(node.value, cst.Call) else ""
        names = {dotted_name(target.target) for target in node.targets} - {""}
        if self._is_trainer(called):
            self._trainers |= names
        elif called.rpartition(".")[2] == "get_cluster_info":
            for name in names:
                self._check_info(node, name)

    def _is_trainer(self, called: str) -> bool:
        return called in self._trainer_names or f".{called}".endswith(".pytorch.Trainer")

    def _check_info(self, node: cst.CSTNode, name: str) -> None:
        variable = re.escape(name)
        text = re.sub(rf"\bassert\s+{variable}\b[^\n;]*", "", self._file.edits.text)  # it fails here
        tests = rf"\b(?:if|elif|not|and|or|while)\s+{variable}\b|\b{variable}\s+is\b|get_cluster_info\(\)\s+is\b"
        if re.search(rf"\b{variable}\.\w", text) and not re.search(tests, text):
            self._file.note(
                node,
                Severity.problem,
                f"get_cluster_info() is None here, and {name} is used as if it were not",
                _INSTEAD,
            )

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802 (a method of libcst's)
        call = node.value
        if isinstance(call, cst.Call) and dotted_name(call.func).rpartition(".")[2] == "get_cluster_info":
            self._file.note(
                node, Severity.problem, f"get_cluster_info() is None here, and has no {node.attr.value}", _INSTEAD
            )

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (a method of libcst's)
        called = node.func
        if m.matches(called, m.Attribute(attr=m.Name("fit"))):
            owner = cst.ensure_type(called, cst.Attribute).value
            is_trainer = dotted_name(owner) in self._trainers or (
                isinstance(owner, cst.Call) and self._is_trainer(dotted_name(owner.func))
            )
            if is_trainer and not self._has_length(node):
                advice = "pass max_length=Batch(...) or Epoch(...), as the experiment's searcher said"
                self._file.note(node, Severity.problem, "fit() without max_length: it came from the searcher", advice)

    def _has_length(self, call: cst.Call) -> bool:
        by_name = any(given.keyword is not None and given.keyword.value == "max_length" for given in call.args)
        # Lightning's fit() takes a module first; scripts give all arguments of Determined's by name.
        return by_name or any(given.star or given.keyword is None for given in call.args)
