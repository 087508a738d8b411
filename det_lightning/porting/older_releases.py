"""Decides what names and calls of older releases of Determined become.

Change here: a renamed member of a trial's context is an entry of ``_RENAMED``. ``det_lightning/porting/imports.py``
rewrites imports, and ``det_lightning/parts_of_determined.py`` has the parts without a counterpart.
"""

from __future__ import annotations

import itertools

import libcst as cst

from det_lightning.porting.counterparts import read_methods
from det_lightning.porting.findings import Severity
from det_lightning.porting.python_syntax import (
    PythonFile,
    base_names,
    called_method,
    dotted_name,
    find_lineage,
    is_keyword,
    list_methods,
    read_string,
)

_RENAMED = {
    # The interface of several models, while private and in the first releases.
    "LRScheduler": "wrap_lr_scheduler",
    "Model": "wrap_model",
    "Optimizer": "wrap_optimizer",
    "_LRScheduler": "wrap_lr_scheduler",
    "_Model": "wrap_model",
    "_Optimizer": "wrap_optimizer",
    "_backward": "backward",
    "_step_optimizer": "step_optimizer",
    "_to_device": "to_device",
    # Ranks, before context.distributed.
    "get_local_rank": "distributed.get_local_rank",
    "get_rank": "distributed.get_rank",
    "get_size": "distributed.get_size",
    # Private, but used by trials.
    "_aggregation_frequency": "aggregation_frequency",
    "_current_batch_idx": "position.batch_idx",
    "_epoch_len": "position.epoch_len",
    "_should_communicate_and_update": "is_update_batch",
}
# det_lightning's context has this name too, for a scaler with other arguments after use_amp().
_KEPT = {"_scaler"}
_GONE = {
    "_hvd_config": "ask context.distributed.get_size() > 1",
    "env": "use context.get_experiment_config(), get_hparams(), or the process's environment",
    "hvd_config": "use context.distributed",
}
_SEVERAL = "distributed.get_size() > 1"
# Reads of the context's inner objects, and the public replacements.
_READS = {
    "_hvd_config.use": _SEVERAL,
    "distributed._hvd_config.use": _SEVERAL,
    "env.experiment_config": "get_experiment_config()",
    "env.hparams": "get_hparams()",
    "hvd_config.use": _SEVERAL,
}
_CONTEXTS = ("context", "trial_context")
_INSIDE = "use a public method of the context, or keep the value in code of your own"
_BUILDERS = {"build_model", "optimizer"}
_TAKE_MODELS = ("train_batch", "evaluate_batch", "evaluate_full_dataset")
_NEW_HOOKS = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_validation_step_end": "on_validation_end",
    "on_validation_step_start": "on_validation_start",
}
_EPOCH_HOOKS = ("on_training_epoch_start", "on_training_epoch_end")
# Needless calls in old examples: the mode is set before the method runs.
_MODE_CALLS = {"train_batch": ("train()", "train(True)"), "evaluate_batch": ("eval()", "train(False)")}


def find_wrapped(file: PythonFile, trial: cst.ClassDef, method: str) -> set[str]:
    """Return the variables and attributes with results of a method of the context, by any name of the method."""
    names = [method, *(old for old, new in _RENAMED.items() if new == method)]
    found = [one for one in file.find(cst.Assign, within=trial) if called_method(one.value) in names]
    return {dotted_name(target.target) for assign in found for target in assign.targets} - {""}


def rewrite_older_releases(file: PythonFile, trials: list[cst.ClassDef], callbacks: list[cst.ClassDef]) -> None:
    """Rewrite old names of the context, old hooks and old calls; note names without replacement."""
    attributes = {node.attr.value for node in file.find(cst.Attribute)}
    for node in file.find(cst.Attribute):
        _check_attribute(file, node)
    for argument in file.find(cst.Arg):
        call = file.parent(argument)
        is_amp = isinstance(call, cst.Call) and dotted_name(call.func).endswith("configure_apex_amp")
        if is_amp and is_keyword(argument, "num_losses") and file.source(argument.value) != "1":
            reason = "num_losses: each loss gets its own scale by the order of the context.backward() calls"
            advice = "call backward() once for each loss and batch, or leave num_losses out for a common scale"
            file.note(argument, Severity.check, reason, advice)
    for callback in callbacks:
        _rewrite_hooks(file, callback, attributes)
    for trial in trials:
        _remove_mode_calls(file, trial)
        names = {method.name.value for method in list_methods(trial)}
        if names >= _BUILDERS:
            reason = f"{trial.name.value} has the interface before Determined 0.12.13 (build_model, optimizer)"
            advice = "it runs through an adapter; to modernize it wrap model and optimizer in __init__"
            file.note(trial, Severity.note, reason, advice)
        if _wraps_its_own(trial, trials):
            for method in list_methods(trial):
                _remove_model(file, method)


# Anywhere


def _check_attribute(file: PythonFile, node: cst.Attribute) -> None:
    owner = dotted_name(node.value)
    name = node.attr.value
    is_context = owner.rpartition(".")[2] in _CONTEXTS
    inner = node.value
    if name == "wrap_reducer" and isinstance(inner, cst.Attribute) and inner.attr.value == "experimental":
        file.edits.replace(file.span(inner.value)[1], file.span(inner)[1], "")
    elif is_context and name in _RENAMED:
        file.replace(node.attr, _RENAMED[name])
    elif is_context or owner.endswith("context.experimental"):
        private = name.startswith("_") and not name.startswith("__") and name not in _KEPT
        if (private or (is_context and name in _GONE)) and not _rewrite_read(file, node):
            reason = f"{owner.removeprefix('self.')}.{name} is internal to Determined"
            file.note(node, Severity.problem, reason, _GONE.get(name, _INSIDE))


def _rewrite_read(file: PythonFile, inner: cst.Attribute) -> bool:
    """Rewrite an access to an inner object of the context that the context has too; return whether it does."""
    read = file.parent(inner)
    outer = file.parent(read)
    if not isinstance(read, cst.Attribute) or isinstance(outer, cst.Del) or getattr(outer, "target", None) is read:
        return False
    if isinstance(outer, cst.Attribute) and not hasattr(dict, outer.attr.value):  # of a class of Determined's
        return False
    name = dotted_name(read)
    for path, new in _READS.items():
        context = name.removesuffix(f".{path}")
        if context != name and context.rpartition(".")[2] in _CONTEXTS:
            file.replace(read, f"({context}.{new})" if new == _SEVERAL else f"{context}.{new}")
            return True
    return False


# Callbacks


def _rewrite_hooks(file: PythonFile, callback: cst.ClassDef, attributes: set[str]) -> None:
    hooks = read_methods("_callback.py", "PyTorchCallback")
    defined = {method.name.value for method in list_methods(callback)}
    for method in list_methods(callback):
        name = method.name.value
        new = _NEW_HOOKS.get(name)
        if new is not None and new not in defined and name not in attributes:
            file.replace(method.name, new)
        elif new is not None:
            file.note(method, Severity.note, f"{name} is deprecated", f"merge it with {new}")
        elif name == "on_before_optimizer_step":
            advice = "pass a function as clip_grads= to context.step_optimizer()"
            file.note(method, Severity.note, f"{name} is deprecated", advice)
        elif name in _EPOCH_HOOKS and name not in attributes:
            _add_epoch(file, method)
        elif name.startswith("on_") and name not in hooks and name not in attributes:
            advice = "use on_training_workload_end or another hook of PyTorchCallback, or do it in train_batch"
            file.note(method, Severity.check, f"{name} is not a hook: nothing calls it", advice)


def _add_epoch(file: PythonFile, method: cst.FunctionDef) -> None:
    """Give a hook the argument added in Determined 0.17."""
    given = method.params
    alone = len(given.params) == 1 and not given.kwonly_params and not given.posonly_params
    starred = isinstance(given.star_arg, cst.Param) or given.star_kwarg is not None
    if alone and not starred and not method.decorators:
        _, end = file.span(given.params[0])
        file.edits.replace(end, end, ", epoch_idx: int")


# Trials


def _remove_mode_calls(file: PythonFile, trial: cst.ClassDef) -> None:
    """Remove ``self.model.train()`` where the model is in training mode anyway and the class never changes the mode."""
    wrapped = find_wrapped(file, trial, "wrap_model")
    mode_calls = [call for call in file.find(cst.Call, within=trial) if called_method(call) in ("train", "eval")]
    removable = [line for method in list_methods(trial) for line in _find_needless_lines(file, method, wrapped)]
    if removable and len(removable) == len(mode_calls):
        for line in removable:
            file.remove_lines(line)


def _find_needless_lines(file: PythonFile, method: cst.FunctionDef, wrapped: set[str]) -> list[cst.SimpleStatementLine]:
    needless = {f"{model}.{call}" for model in wrapped for call in _MODE_CALLS.get(method.name.value, ())}
    simple = [line for line in method.body.body if isinstance(line, cst.SimpleStatementLine)]
    lines = [line for line in simple if file.source(line).strip() in needless]
    return lines if len(lines) < len(method.body.body) else []


def _wraps_its_own(trial: cst.ClassDef, trials: list[cst.ClassDef]) -> bool:
    """Return whether a trial wraps models instead of building one, and all base classes are in the file."""
    lineage = find_lineage(trial, trials)
    names = {method.name.value for one in lineage for method in list_methods(one)}
    outside = {base for one in lineage for base in base_names(one)} - {one.name.value for one in lineage}
    return outside == {"PyTorchTrial"} and "__init__" in names and not names >= _BUILDERS


def _remove_model(file: PythonFile, method: cst.FunctionDef) -> None:
    """Remove an unused model, which is no longer passed, from the parameters of a method."""
    given = method.params.params
    index = next((i for i, parameter in enumerate(given) if parameter.name.value == "model"), 0)
    if method.name.value not in _TAKE_MODELS or index == 0 or given[index].default is not None:
        return
    passed = _find_passed_models(file, method)
    if len(passed) < sum(name.value == "model" for name in file.names(within=method.body)):
        reason = f"{method.name.value}() takes a model, but a trial that wraps models is passed none"
        advice = "remove the parameter, and use the attribute that holds the wrapped model"
        file.note(method, Severity.problem, reason, advice)
        return
    file.edits.replace(file.find_end(given[index - 1]), file.find_end(given[index]), "")
    for before, argument in passed:
        file.edits.replace(file.span(before.value)[1], file.span(argument.value)[1], "")


def _find_passed_models(file: PythonFile, method: cst.FunctionDef) -> list[tuple[cst.Arg, cst.Arg]]:
    """Return each model passed on to the overridden method, with the argument before."""
    return [
        (before, argument)
        for call in file.find(cst.Call, within=method)
        if called_method(call) == method.name.value and file.source(call.func).startswith("super(")
        for before, argument in itertools.pairwise(call.args)
        if isinstance(argument.value, cst.Name) and argument.value.value == "model"
    ]


# The Core API


_CORE_PARTS = ("checkpoint", "distributed", "preempt", "profiler", "searcher", "train")
_STORE = "call store_path() or upload(), with shard=True if several ranks have files"
_GONE_FROM_CORE = {
    "_chief_ip": "ask get_cluster_info().container_addrs[0]",
    "_report_checkpoint": _STORE,
    "_storage_manager": _STORE,
}
# The number of batches in reports of the first releases, and today.
_OLD_COUNT = "latest_batch"
_COUNT = "steps_completed"
_REPORTS = ("report_training_metrics", "report_validation_metrics")
_STORES = ("store_path", "upload")


def rewrite_core_api(file: PythonFile) -> None:
    """Rewrite old and private names of the Core API, and note internal names."""
    for node in file.find(cst.Attribute):
        owner = dotted_name(node.value)
        *_, context, part = ["", "", *owner.split(".")]
        name = node.attr.value
        is_core = part.endswith("core_context") or (context.endswith(("context", "ctx")) and part in _CORE_PARTS)
        is_private = name.startswith("_") and not name.startswith("__")
        if is_core and is_private and not _rename_report(file, node) and not _rewrite_read(file, node):
            reason = f"{owner.removeprefix('self.')}.{name} is internal to Determined"
            file.note(node, Severity.problem, reason, _GONE_FROM_CORE.get(name, _INSIDE))
    _rewrite_batch_counts(file)


def _rename_report(file: PythonFile, method: cst.Attribute) -> bool:
    """Rewrite a report of a group of metrics, unless the report has metrics of each batch."""
    call = file.parent(method)
    if method.attr.value != "_report_trial_metrics" or not isinstance(call, cst.Call) or len(call.args) != 3:
        return False
    file.replace(method.attr, "report_metrics")
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == "total_batches":
            file.replace(argument.keyword, _COUNT)
    return True


def _rewrite_batch_counts(file: PythonFile) -> None:
    """Rename the number of batches in reports, and add the number by today's name to new checkpoints."""
    metadata: dict[cst.BaseExpression, None] = {}  # in the order of the file
    for call in file.find(cst.Call):
        owner, _, method = dotted_name(call.func).rpartition(".")
        keywords = {argument.keyword.value: argument for argument in call.args if argument.keyword is not None}
        if method in _REPORTS and owner.rpartition(".")[2] == "train" and _OLD_COUNT in keywords:
            keyword = keywords[_OLD_COUNT].keyword
            assert keyword is not None
            file.replace(keyword, _COUNT)
        elif method in _STORES and owner.rpartition(".")[2] == "checkpoint":
            given = [keywords["metadata"]] if "metadata" in keywords else call.args[_STORES.index(method) :][:1]
            metadata.update(dict.fromkeys(value for one in given for value in file.find_values(one.value)))
    for literal in metadata:
        if not isinstance(literal, cst.Dict):
            continue
        values = {read_string(part.key): part.value for part in literal.elements if isinstance(part, cst.DictElement)}
        count = values.get(_OLD_COUNT)
        if count is not None and _COUNT not in values and not file.find(cst.Call, within=count):
            start, _ = file.span(literal.elements[0])
            file.edits.replace(start, start, f'"{_COUNT}": {file.source(count)}, ')
