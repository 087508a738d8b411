"""What a training script took from the cluster that ran it, and must provide itself now."""

from __future__ import annotations

import re

import libcst as cst

from det_lightning.porting.findings import Severity
from det_lightning.porting.python_syntax import PythonFile, dotted_name, is_keyword, last_name

_INSTEAD = 'take hparams from your own configuration; latest_checkpoint="last" resumes from the newest one'


def note_cluster_uses(file: PythonFile, trainer_names: set[str]) -> None:
    """Note where a script relies on a Determined master; ``trainer_names`` stand for Determined's ``Trainer`` in it."""
    trainers: set[str] = set()
    for assign in file.find(cst.Assign):
        names = {dotted_name(target.target) for target in assign.targets} - {""}
        if _is_trainer(assign.value, trainer_names):
            trainers |= names
        elif isinstance(assign.value, cst.Call) and last_name(assign.value.func) == "get_cluster_info":
            for name in names:
                _check_info(file, assign, name)
    for use in file.find(cst.Attribute):
        if isinstance(use.value, cst.Call) and last_name(use.value.func) == "get_cluster_info":
            file.note(use, Severity.problem, f"get_cluster_info() is None here, and has no {use.attr.value}", _INSTEAD)
    for call in file.find(cst.Call):
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "fit":
            owner = call.func.value
            is_trainer = dotted_name(owner) in trainers or _is_trainer(owner, trainer_names)
            if is_trainer and not _has_length(call):
                advice = "pass max_length=Batch(...) or Epoch(...), as in the searcher's configuration"
                file.note(
                    call, Severity.problem, "fit() without max_length, which the searcher used to provide", advice
                )


def _is_trainer(value: cst.BaseExpression, trainer_names: set[str]) -> bool:
    called = dotted_name(value.func) if isinstance(value, cst.Call) else ""
    return called in trainer_names or f".{called}".endswith(".pytorch.Trainer")


def _check_info(file: PythonFile, node: cst.CSTNode, name: str) -> None:
    variable = re.escape(name)
    text = re.sub(rf"\bassert\s+{variable}\b[^\n;]*", "", file.edits.text)  # it fails here
    tests = rf"\b(?:if|elif|not|and|or|while)\s+{variable}\b|\b{variable}\s+is\b|get_cluster_info\(\)\s+is\b"
    if re.search(rf"\b{variable}\.\w", text) and not re.search(tests, text):
        reason = f"get_cluster_info() is None here, and {name} is used as if it were not"
        file.note(node, Severity.problem, reason, _INSTEAD)


def _has_length(call: cst.Call) -> bool:
    # Lightning's fit() takes a module first; scripts pass all arguments of Determined's by name.
    return any(given.star or given.keyword is None or is_keyword(given, "max_length") for given in call.args)
