"""What a training script took from the cluster that ran it, and has to say itself now."""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m

from det_lightning.porting.findings import Finding, Level
from det_lightning.porting.syntax import PythonFile, dotted_name

__all__ = ["ClusterUses"]

_OTHERS = ("L.", "lightning.", "pl.", "pytorch_lightning.", "transformers.")
_TELL = 'take hparams from your own configuration; latest_checkpoint="last" goes on from the newest one'


class ClusterUses(cst.CSTVisitor):
    """Notes where a script relies on a Determined master.

    Args:
        file: the file; it uses the PyTorch API.
    """

    def __init__(self, file: PythonFile) -> None:
        super().__init__()
        self._file = file
        self._trainers: set[str] = set()
        file.visit(self)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 (a method of libcst's)
        called = dotted_name(node.value.func) if isinstance(node.value, cst.Call) else ""
        names = {dotted_name(target.target) for target in node.targets} - {""}
        if called.rpartition(".")[2] == "Trainer" and not called.startswith(_OTHERS):
            self._trainers |= names
        elif called.rpartition(".")[2] == "get_cluster_info":
            for name in names:
                self._look_at_info(node, name)

    def _look_at_info(self, node: cst.CSTNode, name: str) -> None:
        text, variable = self._file.edits.text, re.escape(name)
        tests = rf"\b(?:if|elif|assert|not|and|or|while)\s+{variable}\b|\b{variable}\s+is\b|get_cluster_info\(\)\s+is\b"
        if re.search(rf"\b{variable}\.\w", text) and not re.search(tests, text):
            self._note(node, f"get_cluster_info() is None here, and {name} is used as if it were not", _TELL)

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802 (a method of libcst's)
        call = node.value
        if isinstance(call, cst.Call) and dotted_name(call.func).rpartition(".")[2] == "get_cluster_info":
            self._note(node, f"get_cluster_info() is None here, and has no {node.attr.value}", _TELL)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (a method of libcst's)
        called = node.func
        if m.matches(called, m.Attribute(attr=m.Name("fit"))):
            owner = cst.ensure_type(called, cst.Attribute).value
            is_trainer = dotted_name(owner) in self._trainers or (
                isinstance(owner, cst.Call) and dotted_name(owner.func).endswith("pytorch.Trainer")
            )
            if is_trainer and not self._has_length(node):
                advice = "pass max_length=Batch(...) or Epoch(...), as the experiment's searcher said"
                self._note(node, "fit() without max_length: it came from the searcher", advice)

    def _has_length(self, call: cst.Call) -> bool:
        by_name = any(given.keyword is not None and given.keyword.value == "max_length" for given in call.args)
        positional = [given for given in call.args if given.keyword is None]
        return by_name or len(positional) > 2 or any(given.star for given in call.args)

    def _note(self, node: cst.CSTNode, reason: str, advice: str) -> None:
        self._file.findings.append(Finding(self._file.line(node), Level.problem, reason, advice))
