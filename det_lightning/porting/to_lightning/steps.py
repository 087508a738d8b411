"""``train_batch`` and ``evaluate_batch``, as the steps of a module with manual optimization."""

from __future__ import annotations

from typing import TypeVar

import libcst as cst

from det_lightning.porting.python_syntax import (
    called_method,
    dotted_name,
    last_name,
    list_parameters,
    parameter_names,
    read_string,
)
from det_lightning.porting.to_lightning.context_calls import TRAINED_BATCHES
from det_lightning.porting.to_lightning.module_file import ModuleFile, argument, attribute_of_self, list_statements
from det_lightning.porting.to_lightning.trial import Trial, is_by_name

_NO_NUMBERS = (cst.BaseString, cst.BaseDict, cst.BaseList, cst.BaseComp, cst.Tuple)
_RETURN_NO_NUMBER = ("dict", "format", "get_last_lr", "get_lr", "join", "list", "numpy", "str", "tolist", "tuple")
_REDUCTIONS = {"AVG": "mean", "SUM": "sum", "MAX": "max", "MIN": "min"}
_ALL_ALIKE = "batch_size=1, sync_dist=True)  # every batch has the same weight"
# Longer values get a line.
_SHORT = 30
_Node = TypeVar("_Node", bound=cst.CSTNode)


def rewrite_steps(trial: Trial) -> None:
    """Write the steps of the module, with clipping, step and zeroing in place of ``context.step_optimizer``."""
    for call in trial.context_calls("step_optimizer"):
        statement = trial.file.parent(call)
        if isinstance(statement, cst.Expr):
            trial.file.replace_statement(statement, _step_lines(trial, call))
        else:
            trial.file.todo(call, "clip, step and zero the optimizer here")
    trained = _find_metric_names(trial.file, trial.methods["train_batch"])
    for evaluate in filter(None, map(trial.methods.get, ("evaluate_batch", "evaluate_full_dataset"))):
        for name in sorted(trained & _find_metric_names(trial.file, evaluate)):
            trial.file.todo(evaluate, f'training_step() logs "{name}" too: rename one, or loggers mix the two')
    _rewrite_train_batch(trial.file, trial.methods["train_batch"])
    if "evaluate_batch" in trial.methods:
        reducer = trial.methods.get("evaluation_reducer")
        _rewrite_evaluate_batch(trial.file, trial.methods["evaluate_batch"], reducer)
    for name, step in (("train_batch", "training_step"), ("evaluate_batch", "validation_step")):
        for use in trial.find_uses(name):
            trial.file.todo(use, f"{step}() logs what {name}() returned; move the common part to another method")


def _step_lines(trial: Trial, call: cst.Call) -> list[str]:
    file = trial.file
    used = {name.value for name in file.names(within=file.function(call) or call)}
    variable = "lightning_optimizer" if "optimizer" in used else "optimizer"
    lines = [_optimizer_line(trial, argument(call, 0, "optimizer"), variable)]
    if dotted_name(argument(call, 3, "scaler")) not in ("", "None"):
        file.todo(call, "Lightning scales gradients itself: pass precision= to pl.Trainer")
    clip = argument(call, 1, "clip_grads")
    if clip is not None and dotted_name(clip) != "None":
        lines += _clip_lines(trial, clip, variable, used)
        if trial.uses_amp():
            file.todo(call, "gradients are still scaled here; clip them in on_before_optimizer_step(optimizer)")
    return [*lines, f"{variable}.step()", *_zero_lines(file, argument(call, 2, "auto_zero_grads"), variable)]


def _optimizer_line(trial: Trial, optimizer: cst.BaseExpression | None, variable: str) -> str:
    """Return a line that takes the optimizer from Lightning, because Lightning counts the steps."""
    name = "None" if optimizer is None else trial.file.render(optimizer)
    held = trial.optimizers
    position = held.index(name) if name in held else len(held)
    if name in held and not any(other.startswith("*") for other in held[:position]):
        index = "" if len(held) == 1 else f"[{position}]"
        return f"{variable} = self.optimizers(){index}" + (f"  # {name}" if index else "")
    trial.finds_optimizers = True
    return f"{variable} = self.lightning_optimizer({name})"


def _zero_lines(file: ModuleFile, zeroes: cst.BaseExpression | None, variable: str) -> list[str]:
    if zeroes is None or dotted_name(zeroes) == "True":
        return [f"{variable}.zero_grad()"]
    is_never = dotted_name(zeroes) in ("False", "None")
    return [] if is_never else [f"if {file.render(zeroes)}:", f"    {variable}.zero_grad()"]


def _clip_lines(trial: Trial, clip: cst.BaseExpression, variable: str, used: set[str]) -> list[str]:
    file = trial.file
    parameters = f'[p for group in {variable}.param_groups for p in group["params"]]'
    text = file.render(clip)
    chosen = "chosen_clip_grads" if "clip_grads" in used else "clip_grads"
    if isinstance(clip, cst.Lambda):
        given = [parameter.name.value for parameter in clip.params.params]
        if len(given) == 1 and _is_free(file, given[0], clip):
            return [f"{given[0]} = {parameters}", file.render(clip.body)]
        head = f"def {chosen}({', '.join(file.source(parameter) for parameter in clip.params.params)}):"
        return [head, f"    return {file.render(clip.body)}", "", f"{chosen}({parameters})"]
    if _is_function(trial, clip):
        return [f"{text}({parameters})"]
    if not dotted_name(clip):
        return [f"{chosen} = {text}", f"if {chosen} is not None:", f"    {chosen}({parameters})"]
    return [f"if {text} is not None:", f"    {text}({parameters})"]


def _is_free(file: ModuleFile, name: str, clip: cst.Lambda) -> bool:
    """Return whether the function around a lambda has no variable with the name of the lambda's parameter."""
    function = file.function(clip)
    if function is None or name in parameter_names(function):
        return False
    uses = [use for use in file.names(within=function) if use.value == name]
    assigned = [given for use in uses for given in file.assignments(use)]
    return all(
        given is not None and any(isinstance(outer, cst.Lambda) for outer in file.ancestors(given))
        for given in assigned
    )


def _is_function(trial: Trial, value: cst.BaseExpression) -> bool:
    """Return whether an expression is a function, and never None."""
    if isinstance(value, cst.Call):
        return last_name(value.func) == "partial"
    if isinstance(value, cst.Name):
        return {type(given) for given in trial.file.assignments(value)} == {cst.FunctionDef}
    return attribute_of_self(value) in trial.methods


def _rewrite_train_batch(file: ModuleFile, method: cst.FunctionDef) -> None:
    """Write ``training_step``, with logging in place of the values returned by ``train_batch``."""
    given = parameter_names(method)
    batch, epoch_idx, batch_idx = [*given, *["batch", "epoch_idx", "batch_idx"][len(given) - 1 :]][1:4]
    _rewrite_signature(file, method, "training_step", batch)
    used = {name.value for name in file.names(within=method.body)}
    lines = [f"{epoch_idx} = self.current_epoch"] if epoch_idx in used else []
    if batch_idx in used:
        lines.append(f"{batch_idx} = {TRAINED_BATCHES}  # over all epochs")
    if lines:
        file.insert_in_body(method, lines)
    for returned in _in_method(file, method, cst.Return):
        _rewrite_return(file, method, returned, _training_log(file, method, returned))


def _rewrite_evaluate_batch(file: ModuleFile, method: cst.FunctionDef, reducer: cst.FunctionDef | None) -> None:
    """Write ``validation_step``, with logging in place of the returned metrics, reduced in the same way."""
    names = parameter_names(method)
    _rewrite_signature(file, method, "validation_step", names[1] if len(names) > 1 else "batch")
    reductions = _read_reductions(file, reducer)
    if reductions is None:
        file.todo(method, "log each metric with the reduce_fx= that corresponds to evaluation_reducer()")
    if len(names) > 2 and names[2] != "batch_idx":
        file.insert_in_body(method, [f"{names[2]} = batch_idx"])
    for returned in _in_method(file, method, cst.Return):
        _rewrite_return(file, method, returned, _validation_log(file, returned, reductions))
    if reducer is not None:
        file.replace_statement(reducer, [])


def _validation_log(file: ModuleFile, returned: cst.Return, reductions: dict[str, str] | str | None) -> list[str]:
    value = returned.value
    if value is None or (isinstance(value, cst.Dict) and not value.elements):
        return []
    text = file.render(value)
    lines = []
    if len(text) > _SHORT:
        lines = [f"metrics = {text}"]
        text = "metrics"
    if isinstance(reductions, dict):
        kinds = ", ".join(f'"{name}": "{kind}"' for name, kind in reductions.items())
        lines += [f"reductions = {{{kinds}}}", f"for name, value in {text}.items():"]
        return [*lines, f"    self.log(name, value, reduce_fx=reductions[name], {_ALL_ALIKE}"]
    how = "" if reductions in (None, "mean") else f'reduce_fx="{reductions}", '
    return [*lines, f"self.log_dict({text}, {how}{_ALL_ALIKE}"]


def _rewrite_signature(file: ModuleFile, method: cst.FunctionDef, name: str, batch: str) -> None:
    annotation = list_parameters(method)[1].annotation if len(list_parameters(method)) > 1 else None
    typed = f"{batch}, batch_idx)"
    if annotation is not None:
        typed = f"{batch}: {file.render(annotation.annotation)}, batch_idx: int) -> None"
    file.replace_signature(method, f"def {name}(self, {typed}")


def _in_method(file: ModuleFile, method: cst.FunctionDef, kind: type[_Node]) -> list[_Node]:
    """Return the nodes of a method, without inner functions and classes."""
    inner = cst.FunctionDef | cst.Lambda | cst.ClassDef
    found = file.find(kind, within=method)
    return [node for node in found if next(out for out in file.ancestors(node) if isinstance(out, inner)) is method]


def _rewrite_return(file: ModuleFile, method: cst.FunctionDef, returned: cst.Return, lines: list[str]) -> None:
    is_last = returned is list_statements(method.body)[-1]
    literals = [literal for literal in _find_values(file, method, returned.value) if isinstance(literal, cst.Dict)]
    for metric in [element.value for literal in literals for element in literal.elements]:
        for value in _find_values(file, method, metric):
            name = called_method(value) or (last_name(value.func) if isinstance(value, cst.Call) else "")
            if name in _RETURN_NO_NUMBER or isinstance(value, _NO_NUMBERS):
                file.todo(metric, "Lightning logs numbers only: choose one number, or leave the metric out")
    file.replace_statement(returned, lines if is_last else [*lines, "return"])


def _find_metric_names(file: ModuleFile, method: cst.FunctionDef) -> set[str]:
    """Return the names in the dicts that a method returns."""
    returned = [
        value for node in _in_method(file, method, cst.Return) for value in _find_values(file, method, node.value)
    ]
    elements = [element for value in returned if isinstance(value, cst.Dict) for element in value.elements]
    return {read_string(element.key) or "" for element in elements if isinstance(element, cst.DictElement)} - {""}


def _training_log(file: ModuleFile, method: cst.FunctionDef, returned: cst.Return) -> list[str]:
    value = returned.value
    if value is None:
        return ["pass"]
    text = file.render(value)
    kind = _tell_kind(file, method, value)
    if kind:
        return [f"self.log_dict({text})" if kind == "dict" else f'self.log("loss", {text})']
    return [f"metrics = {text}", 'self.log_dict(metrics if isinstance(metrics, dict) else {"loss": metrics})']


def _tell_kind(file: ModuleFile, method: cst.FunctionDef, value: cst.BaseExpression) -> str:
    """Return whether an expression is a dict of metrics or the tensor of a loss, if the code tells."""
    if is_by_name(value):
        return "dict"
    assigned = _find_values(file, method, value)
    if assigned and all(isinstance(given, cst.Dict | cst.DictComp) for given in assigned):
        return "dict"
    returns = "" if method.returns is None else file.source(method.returns.annotation)
    if "ict" in returns and "Union" not in returns and "|" not in returns:
        return "dict"
    return "tensor" if returns.endswith("Tensor") and "|" not in returns else ""


def _find_values(
    file: ModuleFile, method: cst.FunctionDef, value: cst.BaseExpression | None
) -> list[cst.BaseExpression]:
    """Return an expression itself, or the values assigned to a variable within a method."""
    if not isinstance(value, cst.Name):
        return [] if value is None else [value]
    assigns = _in_method(file, method, cst.Assign)
    return [one.value for one in assigns if any(dotted_name(given.target) == value.value for given in one.targets)]


def _read_reductions(file: ModuleFile, reducer: cst.FunctionDef | None) -> dict[str, str] | str | None:
    """Return Lightning's reduction, for all metrics or by name; None if the code does not say."""
    if reducer is None:
        return "mean"
    returns = [*file.find(cst.Return, within=reducer)]
    returned = returns[0].value if len(returns) == 1 else None
    if not isinstance(returned, cst.Dict):
        return _REDUCTIONS.get(last_name(returned))
    found: dict[str, str] = {}
    for element in returned.elements:
        name = read_string(element.key) if isinstance(element, cst.DictElement) else None
        kind = _REDUCTIONS.get(last_name(element.value))
        if name is None or kind is None:
            return None
        found[name] = kind
    return found
