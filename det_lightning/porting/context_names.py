"""Names of the context in older releases, and what trials take from its inside for want of a public name."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.classes import Definitions, methods_of
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.syntax import PythonFile, dotted_name

__all__ = ["ContextNames"]

_RENAMED = {
    # The interface of several models, before it was public.
    "_LRScheduler": "wrap_lr_scheduler",
    "_Model": "wrap_model",
    "_Optimizer": "wrap_optimizer",
    "_backward": "backward",
    "_step_optimizer": "step_optimizer",
    "_to_device": "to_device",
    # Ranks, before they were a part of their own.
    "get_local_rank": "distributed.get_local_rank",
    "get_rank": "distributed.get_rank",
    "get_size": "distributed.get_size",
    # Private, and of use.
    "_aggregation_frequency": "aggregation_frequency",
    "_current_batch_idx": "position.batch_idx",
    "_epoch_len": "position.epoch_len",
    "_should_communicate_and_update": "is_update_batch",
}
# Our context has it too: setting it is how use_amp() gets a scaler of other arguments.
_KEPT = {"_scaler"}
_GONE = {
    "_hvd_config": "ask context.distributed.get_size() > 1",
    "env": "use context.get_experiment_config(), get_hparams(), or the process's environment",
    "hvd_config": "use context.distributed",
}
_INSIDE = "use a public method of the context, or keep the value in the trial"
_TAKE_MODELS = ("train_batch", "evaluate_batch", "evaluate_full_dataset")


class ContextNames(cst.CSTVisitor):
    """Rewrites what an older context had under other names, and notes what it does not have any more.

    Args:
        file: the file; it uses the PyTorch API.
        definitions: its trials.
    """

    def __init__(self, file: PythonFile, definitions: Definitions) -> None:
        super().__init__()
        self._file = file
        file.visit(self)
        for trial in definitions.trials:
            names = {method.name.value for method in methods_of(trial)}
            bases = [dotted_name(base.value).rpartition(".")[2] for base in trial.bases]
            if bases == ["PyTorchTrial"] and "__init__" in names and "build_model" not in names:
                for method in methods_of(trial):
                    self._take_model_away(method)

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802 (a method of libcst's)
        owner, name = dotted_name(node.value), node.attr.value
        is_context = owner.split(".")[-1] in ("context", "trial_context")
        if is_context and name in _RENAMED:
            self._file.replace(node.attr, _RENAMED[name])
        elif is_context or owner.endswith(("context.distributed", "context.experimental")):
            private = name.startswith("_") and not name.startswith("__") and name not in _KEPT
            if private or (is_context and name in _GONE):
                reason = f"{owner.removeprefix('self.')}.{name} belongs to Determined's inside"
                self._note(node, reason, _GONE.get(name, _INSIDE))

    def _take_model_away(self, method: cst.FunctionDef) -> None:
        """Remove the model from the arguments of a method that does not use it: it is not passed any more."""
        given = method.params.params
        index = next((i for i, parameter in enumerate(given) if parameter.name.value == "model"), 0)
        if method.name.value not in _TAKE_MODELS or index == 0 or given[index].default is not None:
            return
        uses = _Uses("model")
        method.body.visit(uses)
        if uses.found:
            reason = f"{method.name.value}() takes a model, which it is not given where the trial wraps its own"
            self._note(method, reason, "take the parameter away, and use the attribute that holds the wrapped model")
        else:
            self._file.edits.replace(self._end(given[index - 1]), self._end(given[index]), "")

    def _end(self, parameter: cst.Param) -> int:
        return self._file.span(parameter.default or parameter.annotation or parameter.name)[1]

    def _note(self, node: cst.CSTNode, reason: str, advice: str) -> None:
        self._file.findings.append(Finding(self._file.line(node), Severity.problem, reason, advice))


class _Uses(cst.CSTVisitor):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.found = False

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802 (a method of libcst's)
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:  # noqa: N802 (a method of libcst's)
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 (a method of libcst's)
        self.found |= node.value == self._name
