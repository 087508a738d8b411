"""``train_batch`` and ``evaluate_batch``, as the steps of a module with manual optimization."""

from __future__ import annotations

import ast

from det_lightning.porting.to_lightning.context_calls import TRAINED_BATCHES
from det_lightning.porting.to_lightning.shape import TrialShape, argument
from det_lightning.porting.to_lightning.source import Source, attribute_of_self, dotted, nodes_of

_REDUCTIONS = {"AVG": "mean", "SUM": "sum", "MAX": "max", "MIN": "min"}
_ALL_ALIKE = "batch_size=1, sync_dist=True)  # every batch has the same weight"
# Longer values get a line of their own.
_SHORT = 30


def rewrite_optimizer_steps(source: Source, shape: TrialShape) -> None:
    """Write clipping, step and zeroing where the trial calls ``context.step_optimizer``."""
    for call in shape.context_calls("step_optimizer"):
        statement = source.parent(call)
        if isinstance(statement, ast.Expr):
            source.rewrite_lines(statement, _step_lines(source, shape, call))
        else:
            source.note(call, "clip, step and zero the optimizer here")


def _step_lines(source: Source, shape: TrialShape, call: ast.Call) -> list[str]:
    optimizer = argument(call, 0, "optimizer")
    name = attribute_of_self(optimizer)
    function = source.function(call)
    used = {node.id for node in ast.walk(function or call) if isinstance(node, ast.Name)}
    variable = "lightning_optimizer" if "optimizer" in used else "optimizer"
    held = shape.optimizers
    position = held.index(name) if name in held else len(held)
    if name in held and not any(other.startswith("*") for other in held[:position]):
        index = "" if len(held) == 1 else f"[{position}]"
        lines = [f"{variable} = self.optimizers(){index}" + (f"  # self.{name}" if index else "")]
    else:
        source.note(call, "take the optimizer from self.optimizers() instead, so that Lightning counts its steps")
        lines = [f"{variable} = {source.render(optimizer) if optimizer else 'None'}"]
    if argument(call, 3, "scaler") is not None:
        source.note(call, "a gradient scaler is Lightning's affair: pass precision= to pl.Trainer")
    lines += _clip_lines(source, argument(call, 1, "clip_grads"), variable)
    zeroes = argument(call, 2, "auto_zero_grads")
    keeps = isinstance(zeroes, ast.Constant) and not zeroes.value
    return [*lines, f"{variable}.step()", *([] if keeps else [f"{variable}.zero_grad()"])]


def _clip_lines(source: Source, clip: ast.expr | None, variable: str) -> list[str]:
    if clip is None or (isinstance(clip, ast.Constant) and clip.value is None):
        return []
    parameters = f'[p for group in {variable}.param_groups for p in group["params"]]'
    if isinstance(clip, ast.Lambda) and len(clip.args.args) == 1:
        return [f"{clip.args.args[0].arg} = {parameters}", source.render(clip.body)]
    text = source.render(clip)
    return [f"{text}({parameters})" if dotted(clip) or isinstance(clip, ast.Call) else f"({text})({parameters})"]


def rewrite_train_batch(source: Source, method: ast.FunctionDef) -> None:
    """Write ``training_step``, which logs what ``train_batch`` returned."""
    names = [given.arg for given in method.args.args] + ["batch", "epoch_idx", "batch_idx"][len(method.args.args) - 1 :]
    batch, epoch_idx, batch_idx = names[1:4]
    _rewrite_signature(source, method, "training_step", batch)
    used = {node.id for statement in method.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    lines = [f"{epoch_idx} = self.current_epoch"] if epoch_idx in used else []
    if batch_idx in used:
        lines.append(f"{batch_idx} = {TRAINED_BATCHES}  # over all epochs")
    if lines:
        source.insert_in_body(method, lines)
    for returned in _returns_of(method):
        _rewrite_return(source, method, returned, _training_log(source, method, returned))


def rewrite_evaluate_batch(source: Source, method: ast.FunctionDef, reducer: ast.FunctionDef | None) -> None:
    """Write ``validation_step``, which logs what ``evaluate_batch`` returned, reduced in the same way."""
    names = [given.arg for given in method.args.args]
    _rewrite_signature(source, method, "validation_step", names[1] if len(names) > 1 else "batch")
    reductions = _reductions_of(reducer)
    if reductions is None:
        source.note(method, "log each metric with the reduce_fx= that evaluation_reducer() asked for")
    if len(names) > 2 and names[2] != "batch_idx":
        source.insert_in_body(method, [f"{names[2]} = batch_idx"])
    for returned in _returns_of(method):
        _rewrite_return(source, method, returned, _validation_log(source, returned, reductions))
    if reducer is not None:
        source.rewrite_lines(reducer, [])


def _validation_log(source: Source, returned: ast.Return, reductions: dict[str, str] | str | None) -> list[str]:
    value = returned.value
    if value is None or (isinstance(value, ast.Dict) and not value.keys):
        return []
    text = source.render(value)
    lines = []
    if len(text) > _SHORT:
        lines = [f"metrics = {text}"]
        text = "metrics"
    if isinstance(reductions, dict):
        kinds = ", ".join(f'"{name}": "{kind}"' for name, kind in reductions.items())
        return [
            *lines,
            f"reductions = {{{kinds}}}",
            f"for name, value in {text}.items():",
            f"    self.log(name, value, reduce_fx=reductions[name], {_ALL_ALIKE}",
        ]
    how = "" if reductions in (None, "mean") else f'reduce_fx="{reductions}", '
    return [*lines, f"self.log_dict({text}, {how}{_ALL_ALIKE}"]


def _rewrite_signature(source: Source, method: ast.FunctionDef, name: str, batch: str) -> None:
    start, end = source.signature(method)
    given = method.args.args[1] if len(method.args.args) > 1 else None
    annotation = source.render(given.annotation) if given is not None and given.annotation is not None else ""
    typed = f"{batch}: {annotation}, batch_idx: int) -> None" if annotation else f"{batch}, batch_idx)"
    source.edits.rewrite(start, end, f"def {name}(self, {typed}")


def _returns_of(method: ast.FunctionDef) -> list[ast.Return]:
    return [node for node in nodes_of(method) if isinstance(node, ast.Return)]


def _rewrite_return(source: Source, method: ast.FunctionDef, returned: ast.Return, lines: list[str]) -> None:
    is_last = returned is method.body[-1]
    source.rewrite_lines(returned, lines if is_last else [*lines, "return"])


def _training_log(source: Source, method: ast.FunctionDef, returned: ast.Return) -> list[str]:
    value = returned.value
    if value is None:
        return ["pass"]
    text = source.render(value)
    kind = _kind_of(method, value)
    if kind == "dict":
        return [f"self.log_dict({text})"]
    if kind == "tensor":
        return [f'self.log("loss", {text})']
    return [f"metrics = {text}", 'self.log_dict(metrics if isinstance(metrics, dict) else {"loss": metrics})']


def _kind_of(method: ast.FunctionDef, value: ast.expr) -> str:
    """Return whether an expression is a dict of metrics or the tensor of a loss, if the code says so."""
    if isinstance(value, ast.Dict | ast.DictComp) or (isinstance(value, ast.Call) and dotted(value.func) == "dict"):
        return "dict"
    if isinstance(value, ast.Name):
        assigned = [
            node.value
            for node in nodes_of(method)
            if isinstance(node, ast.Assign) and any(dotted(target) == value.id for target in node.targets)
        ]
        if assigned and all(isinstance(given, ast.Dict | ast.DictComp) for given in assigned):
            return "dict"
    said = "" if method.returns is None else ast.unparse(method.returns)
    if "ict" in said and "Union" not in said and "|" not in said:
        return "dict"
    return "tensor" if said.endswith("Tensor") and "|" not in said else ""


def _reductions_of(reducer: ast.FunctionDef | None) -> dict[str, str] | str | None:
    """Return Lightning's reduction, for all metrics or by name; None where the code does not say."""
    if reducer is None:
        return "mean"
    returned = reducer.body[-1].value if isinstance(reducer.body[-1], ast.Return) else None
    if isinstance(returned, ast.Dict) and all(isinstance(key, ast.Constant) for key in returned.keys):
        kinds = [_REDUCTIONS.get(dotted(value).rpartition(".")[2]) for value in returned.values]
        names = [str(key.value) for key in returned.keys if isinstance(key, ast.Constant)]
        found = {name: kind for name, kind in zip(names, kinds, strict=True) if kind is not None}
        return found if len(found) == len(names) else None
    return _REDUCTIONS.get(dotted(returned).rpartition(".")[2])
