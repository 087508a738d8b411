"""Which code bypasses a trial's context or relies on a cluster, as findings."""

from __future__ import annotations

import re
from collections.abc import Mapping

import libcst as cst

from det_lightning.porting.bypass_rules import GPU, find_bypasses, find_torch_names, parse
from det_lightning.porting.counterparts import package_finding, read_methods
from det_lightning.porting.findings import Finding, Need, Premise, Severity
from det_lightning.porting.older_releases import find_wrapped
from det_lightning.porting.python_syntax import (
    PythonFile,
    called_method,
    dotted_name,
    is_keyword,
    last_name,
    list_methods,
    read_string,
)

_LOADER = (
    "torch's DataLoader is refused: such a loader neither shards nor resumes",
    "return det_lightning.pytorch.DataLoader, or call context.experimental.disable_dataset_reproducibility_checks()",
)
_APEX = (
    "context.configure_apex_amp() works without it, and passes clip_grads= the parameters that amp.master_params() "
    "returned; or call context.experimental.use_amp()"
)
_CLUSTER = (
    "start the script with det-lightning run CONFIG; for any other start, take hparams from your own "
    'configuration; latest_checkpoint="last" resumes from the newest checkpoint'
)
_DEEPSPEED = (
    "from_deepspeed() needs Determined's launcher of DeepSpeed",
    "write from_torch_distributed(), and start the script with python -m det_lightning.launch.torch_distributed",
)
_CHOOSE = "start it where there is a GPU; or choose the device, as by torch.cuda.is_available()"
# Of torch.multiprocessing and multiprocessing.
_STARTS = ("Process", "spawn", "start_processes")
_LOCAL_RANK = ("--local_rank", "--local-rank")
_LAUNCHED = (
    "let python -m det_lightning.launch.torch_distributed start the script in several processes, and call "
    "init(distributed=DistributedContext.from_torch_distributed())"
)
_TRAINER = "determined.pytorch.Trainer"
_STEP = "call context.step_optimizer(optimizer) instead: it aggregates, clips, scales and zeroes"


def note_bypasses(file: PythonFile, trials: list[cst.ClassDef]) -> None:
    """Note code that does not work with det_lightning, beyond the names of Determined."""
    for statement in file.find(cst.Import, cst.ImportFrom):
        for module in _list_imports(statement):
            _check_module(file, statement, module)
    for trial in trials:
        optimizers = find_wrapped(file, trial, "wrap_optimizer")
        for method in _find_training_methods(file, trial):
            _check_steps(file, method, optimizers)
        if "disable_dataset_reproducibility_checks" not in file.edits.text:
            _check_loaders(file, trial)


def note_devices(file: PythonFile, has_trials: bool, has_context: bool) -> None:
    """Note devices and processes that the code sets up in place of the trial's context, and code that needs a GPU.

    Scripts of the Core API set these up themselves, as on Determined.
    """
    makes_own_group = "from_torch_distributed" in file.edits.text
    in_trial = Premise.nothing if has_trials else Premise.in_trial
    elsewhere = Premise.nothing if has_trials or has_context else Premise.outside_trial
    for found in find_bypasses(parse(file.edits.text)):
        is_own_group = makes_own_group and "init_process_group" in found.code
        if found.kind != GPU and (has_trials or not has_context) and not is_own_group:
            by_context = (found.reason, found.advice, Need.nothing, in_trial, found.needs_gpu)
            file.findings.append(Finding(found.line, Severity.check, *by_context))
        if found.needs_gpu and (found.kind == GPU or not has_trials or is_own_group):
            reason = f"needs a GPU: {found.code.splitlines()[0][:60]}"
            file.findings.append(Finding(found.line, Severity.check, reason, _CHOOSE, Need.nothing, elsewhere, True))


def _list_imports(statement: cst.Import | cst.ImportFrom) -> list[str]:
    """Return the imported names; ``module.`` stands for all names of a module."""
    if isinstance(statement, cst.Import):
        return [dotted_name(alias.name) for alias in statement.names]
    module = dotted_name(statement.module)
    if statement.relative:
        return []
    if isinstance(statement.names, cst.ImportStar) or module.split(".")[0] == "model_hub":  # one finding is enough
        return [f"{module}."]
    return [f"{module}.{alias.evaluated_name}" for alias in statement.names]


def _check_module(file: PythonFile, node: cst.CSTNode, module: str) -> None:
    is_tried = any(isinstance(outer, cst.Try) for outer in file.ancestors(node))
    if module.startswith("horovod."):
        advice = "use context.distributed for rank and size, and strategy='horovod' to train with Horovod"
        file.note(node, Severity.check, "your own use of Horovod", advice)
    elif module.startswith("apex.amp") or (module == "apex" and "apex.amp" in file.edits.text and not is_tried):
        file.note(node, Severity.check, "apex.amp is gone from apex", _APEX)
    elif (finding := package_finding(module.rstrip("."), file.line(node))) is not None:
        file.findings.append(finding)


# In a trial


def _check_loaders(file: PythonFile, trial: cst.ClassDef) -> None:
    names = find_torch_names(parse(file.edits.text))
    builders = ("build_training_data_loader", "build_validation_data_loader")
    for method in list_methods(trial):
        for returned in file.find(cst.Return, within=method) if method.name.value in builders else []:
            loader = returned.value
            first, dot, rest = (dotted_name(loader.func) if isinstance(loader, cst.Call) else "").partition(".")
            called = f"{names.get(first, first)}{dot}{rest}"
            if loader and called.startswith("torch.") and called.endswith(".DataLoader"):
                file.note(loader, Severity.problem, *_LOADER)


def _find_training_methods(file: PythonFile, trial: cst.ClassDef) -> list[cst.FunctionDef]:
    """Return ``train_batch``, and all methods called by it, directly or indirectly."""
    methods = {f"self.{method.name.value}": method for method in list_methods(trial)}
    found = [methods[name] for name in ("self.train_batch",) if name in methods]
    for method in found:  # grows
        called = [
            dotted_name(call.func)
            for call in file.find(cst.Call, within=method.body)
            if not _is_passed(file, call, method)
        ]
        found += [methods[name] for name in dict.fromkeys(called) if name in methods and methods[name] not in found]
    return found


def _check_steps(file: PythonFile, method: cst.FunctionDef, optimizers: set[str]) -> None:
    for call in file.find(cst.Call, within=method):
        owner = dotted_name(call.func.value) if isinstance(call.func, cst.Attribute) else ""
        name = called_method(call)
        if name == "backward" and not owner.endswith("context"):
            reason = f"{owner or 'a loss'}.backward() goes around the context"
            file.note(call, Severity.check, reason, "call context.backward(loss)")
        elif name == "step" and owner in optimizers:
            file.note(call, Severity.check, f"{owner}.step() goes around the context", _STEP)
        elif name == "zero_grad" and owner in optimizers and "auto_zero_grads" not in file.edits.text:
            advice = "remove it: context.step_optimizer() zeroes, where it has stepped"
            file.note(call, Severity.check, f"{owner}.zero_grad() clears the gradients of an aggregation", advice)
        elif name in ("clip_grad_norm_", "clip_grad_value_") and not _is_passed(file, call, method):
            reason = f"{name}() clips before gradients are averaged over batches and ranks"
            advice = f"pass clip_grads=lambda params: torch.nn.utils.{name}(params, ...) to context.step_optimizer()"
            file.note(call, Severity.check, reason, advice)


def _is_passed(file: PythonFile, node: cst.CSTNode, method: cst.FunctionDef) -> bool:
    """Return whether a node is in a function within a method, for example a function passed as ``clip_grads``."""
    around = next(outer for outer in file.ancestors(node) if isinstance(outer, cst.Lambda | cst.FunctionDef))
    return around is not method


# In a script


def note_cluster_uses(file: PythonFile, paths: Mapping[str, str]) -> None:
    """Note where a script relies on a Determined cluster; ``paths`` are the imported parts of Determined."""
    trainers: set[str] = set()
    for assign in file.find(cst.Assign):
        names = {dotted_name(target.target) for target in assign.targets} - {""}
        called = _find_called(assign.value, paths)
        if called == _TRAINER:
            trainers |= names
        elif called.endswith(".get_cluster_info"):
            for name in names:
                _check_info(file, assign, name)
    _check_processes(file)
    for use in file.find(cst.Attribute):
        if _find_called(use.value, paths).endswith(".get_cluster_info"):
            name = use.attr.value
            reason = f"get_cluster_info() is None outside of det-lightning run, so .{name} raises an AttributeError"
            file.note(use, Severity.check, reason, _CLUSTER, Premise.by_hand)
    for call in file.find(cst.Call):
        if last_name(call.func) == "from_deepspeed":
            # A script with several ways to start can take another.
            around = [outer for outer in file.ancestors(call) if isinstance(outer, cst.If | cst.IfExp)]
            is_choice = any(
                "__name__" not in file.source(outer.test) and (outer.orelse or file.find(cst.Return, within=outer))
                for outer in around
            )
            file.note(call, Severity.check if is_choice else Severity.problem, *_DEEPSPEED)
        if isinstance(call.func, cst.Attribute):
            owner = call.func.value
            if dotted_name(owner) in trainers or _find_called(owner, paths) == _TRAINER:
                _check_trainer(file, call, call.func.attr.value)


def _check_processes(file: PythonFile) -> None:
    """Note ranks that a script starts itself, and the argument of a launcher that starts them."""
    imports = [one for one in file.find(cst.Import, cst.ImportFrom) if "multiprocessing" in file.source(one)]
    aliases = [alias for one in imports if not isinstance(one.names, cst.ImportStar) for alias in one.names]
    names = {alias.evaluated_alias or alias.evaluated_name.split(".")[0] for alias in aliases} - {"torch"}
    for call in file.find(cst.Call):
        name = dotted_name(call.func)
        # Other processes write logs, or fetch data.
        is_rank = last_name(call.func) != "Process" or "rank" in file.source(call).lower()
        is_start = last_name(call.func) in _STARTS and ("multiprocessing." in name or name.split(".")[0] in names)
        if is_start and is_rank:
            file.note(call, Severity.check, f"{name}() starts processes of its own", _LAUNCHED)
        elif last_name(call.func) == "add_argument" and call.args and read_string(call.args[0].value) in _LOCAL_RANK:
            reason = f"{file.source(call.args[0])} is passed by torch.distributed.launch only"
            file.note(call, Severity.check, reason, "read LOCAL_RANK from the environment")


def _check_trainer(file: PythonFile, call: cst.Call, method: str) -> None:
    """Note a call of Determined's ``Trainer`` that always fails, or works in experiments only."""
    # Lightning's fit() takes a module first; scripts pass all arguments of Determined's by name.
    has_length = any(given.star or given.keyword is None or is_keyword(given, "max_length") for given in call.args)
    if method == "fit" and not has_length:
        advice = (
            "start the script with det-lightning run CONFIG; for any other start, pass "
            "max_length=Batch(...) or Epoch(...)"
        )
        reason = "fit() without max_length: only the searcher of an experiment provides a length"
        file.note(call, Severity.check, reason, advice, Premise.by_hand)
    elif method not in read_methods("_trainer.py", "Trainer"):
        reason = f"Trainer has no method {method}(), neither here nor in Determined"
        file.note(call, Severity.problem, reason, "call fit(max_length=...), which trains and validates")


def _find_called(value: cst.BaseExpression, paths: Mapping[str, str]) -> str:
    """Return Determined's dotted name of the called function; other names begin with a dot."""
    first, dot, rest = (dotted_name(value.func) if isinstance(value, cst.Call) else "").partition(".")
    return f"{paths.get(first, f'.{first}')}{dot}{rest}"


def _check_info(file: PythonFile, node: cst.CSTNode, name: str) -> None:
    variable = re.escape(name)
    text = re.sub(rf"\bassert\s+{variable}\b[^\n;]*", "", file.edits.text)  # an assertion fails here
    tests = rf"\b(?:if|elif|not|and|or|while)\s+{variable}\b|\b{variable}\s+is\b|get_cluster_info\(\)\s+is\b"
    if re.search(rf"\b{variable}\.\w", text) and not re.search(tests, text):
        reason = f"get_cluster_info() is None outside of det-lightning run, and the code needs {name}"
        file.note(node, Severity.check, reason, _CLUSTER, Premise.by_hand)
