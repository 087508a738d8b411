"""Spellings of older releases, in those of today."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from det_lightning.porting.classes import Definitions, methods_of
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.names import callback_hooks
from det_lightning.porting.syntax import PythonFile, dotted_name

__all__ = ["DeprecatedSpellings"]

_NEW_HOOKS = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_validation_step_end": "on_validation_end",
    "on_validation_step_start": "on_validation_start",
}
_EPOCH_HOOKS = ("on_training_epoch_start", "on_training_epoch_end")
_OLD_INTERFACE = {"build_model", "optimizer"}
# What was left to the trial in examples, and is done for it: the mode that a method runs in.
_MODE_CALLS = {"train_batch": ("train", "True"), "evaluate_batch": ("eval", "False")}


class DeprecatedSpellings(cst.CSTVisitor):
    """Rewrites ``context.experimental.wrap_reducer``, old callbacks, and calls that do what is done already.

    Args:
        file: the file; it uses the PyTorch API.
        definitions: its trials and callbacks.
    """

    def __init__(self, file: PythonFile, definitions: Definitions) -> None:
        super().__init__()
        self._file = file
        self._called: set[str] = set()
        file.visit(self)
        for callback in definitions.callbacks:
            self._rewrite_hooks(callback)
        for trial in definitions.trials:
            self._remove_mode_calls(trial)
            self._note_old_interface(trial)

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802 (a method of libcst's)
        self._called.add(node.attr.value)
        if node.attr.value == "wrap_reducer" and m.matches(node.value, m.Attribute(attr=m.Name("experimental"))):
            inner = cst.ensure_type(node.value, cst.Attribute)
            self._file.edits.replace(self._file.span(inner.value)[1], self._file.span(inner)[1], "")

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (a method of libcst's)
        if dotted_name(node.func).endswith("configure_apex_amp"):
            self._check_losses(node)

    def _check_losses(self, call: cst.Call) -> None:
        for argument in call.args:
            is_number = argument.keyword is not None and argument.keyword.value == "num_losses"
            if is_number and self._file.source(argument.value) != "1":
                reason = "num_losses: each loss gets its own scale by the order of the context.backward() calls"
                advice = "call backward() once for each loss and batch, or leave num_losses out for a common scale"
                self._note(argument, Severity.check, reason, advice)

    # Callbacks

    def _rewrite_hooks(self, callback: cst.ClassDef) -> None:
        defined = {method.name.value for method in methods_of(callback)}
        for method in methods_of(callback):
            name = method.name.value
            new = _NEW_HOOKS.get(name)
            if new is not None and new not in defined and name not in self._called:
                self._file.replace(method.name, new)
            elif new is not None:
                self._note(method, Severity.note, f"{name} is deprecated", f"merge it with {new}")
            elif name == "on_before_optimizer_step":
                advice = "pass a function as clip_grads= to context.step_optimizer()"
                self._note(method, Severity.note, f"{name} is deprecated", advice)
            elif name in _EPOCH_HOOKS:
                self._add_epoch(method)
            elif name.startswith("on_") and name not in callback_hooks() and name not in self._called:
                advice = "use on_training_workload_end or another hook of PyTorchCallback, or do it in train_batch"
                self._note(method, Severity.check, f"{name} is no hook: nothing calls it", advice)

    def _add_epoch(self, method: cst.FunctionDef) -> None:
        """Give a hook its argument, which it did without until Determined 0.17."""
        given = method.params
        alone = len(given.params) == 1 and not given.kwonly_params and not given.posonly_params
        starred = isinstance(given.star_arg, cst.Param) or given.star_kwarg is not None
        if alone and not starred and not method.decorators and method.name.value not in self._called:
            _, end = self._file.span(given.params[0])
            self._file.edits.replace(end, end, ", epoch_idx: int")

    # Modes

    def _remove_mode_calls(self, trial: cst.ClassDef) -> None:
        """Remove ``self.model.train()`` where the model is in that mode anyway, and nothing in the class changes it."""
        wrapped = self._wrapped_models(trial)
        mode_calls = m.findall(trial, m.Call(func=m.Attribute(attr=m.Name("train") | m.Name("eval"))))
        removable = [line for method in methods_of(trial) for line in self._needless_lines(method, wrapped)]
        if removable and len(removable) == len(mode_calls):
            for line in removable:
                self._file.remove_lines(line)

    def _wrapped_models(self, trial: cst.ClassDef) -> set[str]:
        wrapping = m.Assign(value=m.Call(func=m.Attribute(attr=m.Name("wrap_model"))))
        return {
            dotted_name(target.target)
            for assign in m.findall(trial, wrapping)
            for target in cst.ensure_type(assign, cst.Assign).targets
        } - {""}

    def _needless_lines(self, method: cst.FunctionDef, wrapped: set[str]) -> list[cst.SimpleStatementLine]:
        if method.name.value not in _MODE_CALLS:
            return []
        name, value = _MODE_CALLS[method.name.value]
        needless = {f"{model}.{call}" for model in wrapped for call in (f"{name}()", f"train({value})")}
        lines = [
            line
            for line in method.body.body
            if isinstance(line, cst.SimpleStatementLine) and self._file.source(line).strip() in needless
        ]
        return lines if len(lines) < len(method.body.body) else []

    def _note_old_interface(self, trial: cst.ClassDef) -> None:
        if {method.name.value for method in methods_of(trial)} >= _OLD_INTERFACE:
            reason = f"{trial.name.value} has the interface before Determined 0.12.13 (build_model, optimizer)"
            advice = "it runs through an adapter; to modernize it wrap model and optimizer in __init__"
            self._note(trial, Severity.note, reason, advice)

    def _note(self, node: cst.CSTNode, severity: Severity, reason: str, advice: str) -> None:
        self._file.findings.append(Finding(self._file.line(node), severity, reason, advice))
