"""What older releases had: names and calls of Determined, rewritten to today's, and names of other libraries."""

from __future__ import annotations

import libcst as cst

from det_lightning.porting.bindings import Bindings, Reference
from det_lightning.porting.counterparts import methods_in
from det_lightning.porting.findings import Severity
from det_lightning.porting.python_syntax import PythonFile, base_names, dotted_name, is_keyword, methods_of, string_of

_RENAMED = {
    # The interface of several models, before it was public.
    "_LRScheduler": "wrap_lr_scheduler",
    "_Model": "wrap_model",
    "_Optimizer": "wrap_optimizer",
    "_backward": "backward",
    "_step_optimizer": "step_optimizer",
    "_to_device": "to_device",
    # Ranks, before they had their own part of the context.
    "get_local_rank": "distributed.get_local_rank",
    "get_rank": "distributed.get_rank",
    "get_size": "distributed.get_size",
    # Private, but used by trials.
    "_aggregation_frequency": "aggregation_frequency",
    "_current_batch_idx": "position.batch_idx",
    "_epoch_len": "position.epoch_len",
    "_should_communicate_and_update": "is_update_batch",
}
# det_lightning's context has it too: setting it is how use_amp() gets a scaler with other arguments.
_KEPT = {"_scaler"}
_GONE = {
    "_hvd_config": "ask context.distributed.get_size() > 1",
    "env": "use context.get_experiment_config(), get_hparams(), or the process's environment",
    "hvd_config": "use context.distributed",
}
_INSIDE = "use a public method of the context, or keep the value in the trial"
_TAKE_MODELS = ("train_batch", "evaluate_batch", "evaluate_full_dataset")
_NEW_HOOKS = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_validation_step_end": "on_validation_end",
    "on_validation_step_start": "on_validation_start",
}
_EPOCH_HOOKS = ("on_training_epoch_start", "on_training_epoch_end")
# What trials in examples did themselves, and is done for them: setting the mode that a method runs in.
_MODE_CALLS = {"train_batch": ("train()", "train(True)"), "evaluate_batch": ("eval()", "train(False)")}


def rewrite_older_releases(file: PythonFile, trials: list[cst.ClassDef], callbacks: list[cst.ClassDef]) -> None:
    """Rewrite names of the context, hooks of callbacks and calls of older releases, and note what is gone."""
    attributes = {node.attr.value for node in file.find(cst.Attribute)}
    for node in file.find(cst.Attribute):
        _check_attribute(file, node)
    for call in file.find(cst.Call):
        if dotted_name(call.func).endswith("configure_apex_amp"):
            _check_losses(file, call)
    for callback in callbacks:
        _rewrite_hooks(file, callback, attributes)
    for trial in trials:
        _remove_mode_calls(file, trial)
        names = {method.name.value for method in methods_of(trial)}
        if names >= {"build_model", "optimizer"}:
            reason = f"{trial.name.value} has the interface before Determined 0.12.13 (build_model, optimizer)"
            advice = "it runs through an adapter; to modernize it wrap model and optimizer in __init__"
            file.note(trial, Severity.note, reason, advice)
        if base_names(trial) == ["PyTorchTrial"] and "__init__" in names and "build_model" not in names:
            for method in methods_of(trial):
                _remove_model(file, method)


# Anywhere


def _check_attribute(file: PythonFile, node: cst.Attribute) -> None:
    owner = dotted_name(node.value)
    name = node.attr.value
    is_context = owner.split(".")[-1] in ("context", "trial_context")
    inner = node.value
    if name == "wrap_reducer" and isinstance(inner, cst.Attribute) and inner.attr.value == "experimental":
        file.edits.replace(file.span(inner.value)[1], file.span(inner)[1], "")
    elif is_context and name in _RENAMED:
        file.replace(node.attr, _RENAMED[name])
    elif is_context or owner.endswith(("context.distributed", "context.experimental")):
        private = name.startswith("_") and not name.startswith("__") and name not in _KEPT
        if private or (is_context and name in _GONE):
            reason = f"{owner.removeprefix('self.')}.{name} is internal to Determined"
            file.note(node, Severity.problem, reason, _GONE.get(name, _INSIDE))


def _check_losses(file: PythonFile, call: cst.Call) -> None:
    for argument in call.args:
        if is_keyword(argument, "num_losses") and file.source(argument.value) != "1":
            reason = "num_losses: each loss gets its own scale by the order of the context.backward() calls"
            advice = "call backward() once for each loss and batch, or leave num_losses out for a common scale"
            file.note(argument, Severity.check, reason, advice)


# Callbacks


def _rewrite_hooks(file: PythonFile, callback: cst.ClassDef, attributes: set[str]) -> None:
    hooks = methods_in("_callback.py", "PyTorchCallback")
    defined = {method.name.value for method in methods_of(callback)}
    for method in methods_of(callback):
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
    """Give a hook its argument, which it did not have until Determined 0.17."""
    given = method.params
    alone = len(given.params) == 1 and not given.kwonly_params and not given.posonly_params
    starred = isinstance(given.star_arg, cst.Param) or given.star_kwarg is not None
    if alone and not starred and not method.decorators:
        _, end = file.span(given.params[0])
        file.edits.replace(end, end, ", epoch_idx: int")


# Trials


def _remove_mode_calls(file: PythonFile, trial: cst.ClassDef) -> None:
    """Remove ``self.model.train()`` if the model is in that mode anyway and nothing in the class changes it."""
    wrapped = {
        dotted_name(target.target)
        for assign in file.find(cst.Assign, within=trial)
        for target in assign.targets
        if _calls(assign.value, "wrap_model")
    } - {""}
    mode_calls = [call for call in file.find(cst.Call, within=trial) if _calls(call, "train", "eval")]
    removable = [line for method in methods_of(trial) for line in _needless_lines(file, method, wrapped)]
    if removable and len(removable) == len(mode_calls):
        for line in removable:
            file.remove_lines(line)


def _needless_lines(file: PythonFile, method: cst.FunctionDef, wrapped: set[str]) -> list[cst.SimpleStatementLine]:
    needless = {f"{model}.{call}" for model in wrapped for call in _MODE_CALLS.get(method.name.value, ())}
    lines = [
        line
        for line in method.body.body
        if isinstance(line, cst.SimpleStatementLine) and file.source(line).strip() in needless
    ]
    return lines if len(lines) < len(method.body.body) else []


def _remove_model(file: PythonFile, method: cst.FunctionDef) -> None:
    """Remove the model from the arguments of a method that does not use it: it is no longer passed."""
    given = method.params.params
    index = next((i for i, parameter in enumerate(given) if parameter.name.value == "model"), 0)
    if method.name.value not in _TAKE_MODELS or index == 0 or given[index].default is not None:
        return
    if any(name.value == "model" for name in file.names(within=method.body)):
        reason = f"{method.name.value}() takes a model, which is not passed where the trial wraps its own"
        advice = "remove the parameter, and use the attribute that holds the wrapped model"
        file.note(method, Severity.problem, reason, advice)
    else:
        file.edits.replace(file.end_of(given[index - 1]), file.end_of(given[index]), "")


def _calls(node: cst.CSTNode, *methods: str) -> bool:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in methods


# The Core API: its first releases counted batches as latest_batch


_OLD_COUNT = "latest_batch"
_COUNT = "steps_completed"
_REPORTS = ("report_training_metrics", "report_validation_metrics")
_STORES = ("store_path", "upload")


def rewrite_batch_counts(file: PythonFile) -> None:
    """Rename the number of batches in reports of the Core API, and add it under today's name to new checkpoints."""
    metadata: dict[cst.Dict, None] = {}  # in the order of the file
    for call in file.find(cst.Call):
        owner, _, method = dotted_name(call.func).rpartition(".")
        keywords = {argument.keyword.value: argument for argument in call.args if argument.keyword is not None}
        if method in _REPORTS and owner.rpartition(".")[2] == "train" and _OLD_COUNT in keywords:
            keyword = keywords[_OLD_COUNT].keyword
            assert keyword is not None
            file.replace(keyword, _COUNT)
        elif method in _STORES and owner.rpartition(".")[2] == "checkpoint":
            given = [keywords["metadata"]] if "metadata" in keywords else call.args[_STORES.index(method) :][:1]
            metadata.update(dict.fromkeys(literal for one in given for literal in _dicts_of(file, one.value)))
    for literal in metadata:
        values = {string_of(part.key): part.value for part in literal.elements if isinstance(part, cst.DictElement)}
        count = values.get(_OLD_COUNT)
        if count is not None and _COUNT not in values and not file.find(cst.Call, within=count):
            start, _ = file.span(literal.elements[0])
            file.edits.replace(start, start, f'"{_COUNT}": {file.source(count)}, ')


def _dicts_of(file: PythonFile, node: cst.CSTNode) -> list[cst.Dict]:
    """Return the literal that an expression is, or those that are assigned to a variable."""
    if isinstance(node, cst.Dict):
        return [node]
    targets = file.assignments(node) if isinstance(node, cst.Name) else []
    statements = [file.parent(file.parent(target) or target) for target in targets if target is not None]
    return [one.value for one in statements if isinstance(one, cst.Assign) and isinstance(one.value, cst.Dict)]


# Libraries: what today's torch, numpy, Pillow and Python no longer have


_PLAIN_TYPE = ("is gone since numpy 1.24", "use Python's {last}")
_NUMPY_2 = "is gone since numpy 2"
_RENAMED_IN_NUMPY_2 = {
    "Inf": "inf", "Infinity": "inf", "infty": "inf", "PINF": "inf", "NaN": "nan", "complex_": "complex128",
    "float_": "float64", "string_": "bytes_", "unicode_": "str_", "product": "prod", "cumproduct": "cumprod",
    "sometrue": "any", "alltrue": "all", "round_": "round",
}  # fmt: skip
_COLLECTIONS = ("is gone since Python 3.10", "import it from collections.abc")
_NO_LINALG = "raises an error since torch 2.0"
_LINALG = (_NO_LINALG, "use torch.linalg.{last}, whose results may have another form")

# By the full name: since when it is gone, and what to use.
_GONE_FROM_LIBRARIES = {
    **{f"numpy.{name}": _PLAIN_TYPE for name in ("float", "int", "complex", "object", "str")},
    "numpy.unicode": ("is gone since numpy 1.24", "use Python's str"),
    **{f"numpy.{old}": (_NUMPY_2, f"use numpy.{new}") for old, new in _RENAMED_IN_NUMPY_2.items()},
    "numpy.NINF": (_NUMPY_2, "use -numpy.inf"),
    "numpy.asfarray": (_NUMPY_2, "use numpy.asarray(..., dtype=float)"),
    "numpy.asscalar": ("is gone since numpy 1.23", "use the array's item()"),
    "numpy.in1d": ("is gone since numpy 2.4", "use numpy.isin"),
    "numpy.trapz": ("is gone since numpy 2.4", "use numpy.trapezoid"),
    "torch._six": ("is gone since torch 2.0", "use str, int and collections.abc"),
    "torch.symeig": (_NO_LINALG, "use torch.linalg.eigh"),
    "torch.lstsq": (_NO_LINALG, "use torch.linalg.lstsq"),
    **{f"torch.{name}": _LINALG for name in ("eig", "solve", "matrix_rank")},
    **{f"torch.{name}": ("is gone since torch 1.8", "use torch.fft") for name in ("rfft", "irfft")},
    "PIL.Image.ANTIALIAS": ("is gone since Pillow 10", "use PIL.Image.LANCZOS"),
    "PIL.Image.LINEAR": ("is gone since Pillow 10", "use PIL.Image.BILINEAR"),
    "PIL.Image.CUBIC": ("is gone since Pillow 10", "use PIL.Image.BICUBIC"),
    **{
        f"collections.{name}": _COLLECTIONS
        for name in ("Callable", "Iterable", "Iterator", "Mapping", "MutableMapping", "Sequence", "Set", "Sized")
    },
}


def note_older_libraries(file: PythonFile) -> None:
    """Note the uses of libraries that today's releases no longer have, or interpret differently."""
    for package in ("torch", "numpy", "PIL", "collections"):
        bindings = Bindings(file, package)
        for use in bindings.references:
            _check_use(file, use, f"{package}{use.path.removeprefix('determined')}")
        for binding in bindings.found:
            # What is bound and never looked up, such as a module from which names are imported.
            path = f"{package}{binding.path.removeprefix('determined')}"
            _note_gone(file, binding.statement, path, is_module=True)


def _check_use(file: PythonFile, use: Reference, path: str) -> None:
    if use.attributes:
        _note_gone(file, use.node, path, is_module=False)
    call = file.parent(use.expression)
    if not isinstance(call, cst.Call) or call.func is not use.expression:
        return
    if path.startswith("torch.optim.lr_scheduler.") and any(is_keyword(one, "verbose") for one in call.args):
        name = path.rpartition(".")[2]
        advice = "leave it out; get_last_lr() tells the learning rate"
        file.note(call, Severity.note, f"{name}(verbose=) is gone; torch 2.6 was the last to have it", advice)
    elif path == "torch.load" and not any(is_keyword(one, "weights_only") for one in call.args):
        reason = "torch.load() reads tensors and plain containers only, since torch 2.6"
        file.note(call, Severity.note, reason, "pass weights_only=False for whole modules in files that you trust")
    elif path == "PIL.Image.fromarray" and (len(call.args) > 1 or any(is_keyword(one, "mode") for one in call.args)):
        reason = "Image.fromarray(mode=) converts no values, and Pillow has deprecated it"
        file.note(call, Severity.note, reason, "convert the array first, as with array.astype(numpy.uint8)")


def _note_gone(file: PythonFile, node: cst.CSTNode, path: str, is_module: bool) -> None:
    for name, (since, advice) in _GONE_FROM_LIBRARIES.items():
        if name == path or (is_module and path.startswith(f"{name}.")):
            file.note(node, Severity.note, f"{name} {since}", advice.format(last=name.rpartition(".")[2]))
