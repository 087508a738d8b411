"""What goes around a trial's context: devices, processes, sharding and steps of a project's own."""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m

from det_lightning.porting.findings import Severity
from det_lightning.porting.python_syntax import Definitions, PythonFile, dotted_name, methods_of, string_of

_DEVICE = re.compile(r"cuda(:\d+)?")
_TO_CONTEXT = "wrapped models and batches are placed already; move other tensors with context.to_device(...)"
_BY_NAME = {
    "DataParallel": ("DataParallel of your own", "wrap the model with context.wrap_model() only"),
    "DistributedDataParallel": (
        "DistributedDataParallel of your own",
        "wrap the model with context.wrap_model() only; it becomes a DDP model where there are several processes",
    ),
    "set_device": ("a GPU is chosen by hand", "remove it; each process has its own device, context.device"),
}
_SAMPLER = ("DistributedSampler of your own", "remove it; det_lightning.pytorch.DataLoader shards over the ranks")
_GROUP = (
    "a process group of your own",
    "remove it from the trial; a training script may make one and pass "
    "distributed=DistributedContext.from_torch_distributed() to det_lightning.pytorch.init()",
)
_LOADERS = ("build_training_data_loader", "build_validation_data_loader")
_LOADER = (
    "torch's DataLoader is returned, which is refused: it is not sharded and does not resume",
    "return det_lightning.pytorch.DataLoader, or call context.experimental.disable_dataset_reproducibility_checks()",
)
_APEX = (
    "context.configure_apex_amp() works without it, and gives clip_grads= what amp.master_params() gave; or call "
    "context.experimental.use_amp()"
)
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_STEP = "call context.step_optimizer(optimizer) instead: it aggregates, clips, scales and zeroes"


class Bypasses(cst.CSTVisitor):
    """Notes what does not work with det_lightning though it is not a name of Determined.

    Args:
        file: the file.
        definitions: its trials and callbacks.
    """

    def __init__(self, file: PythonFile, definitions: Definitions) -> None:
        super().__init__()
        self._file = file
        self._connects = "from_torch_distributed" in file.edits.text
        self._torch_names = _names_from_torch(file)
        file.visit(self)
        for trial in definitions.trials:
            for method in methods_of(trial):
                self._check_method(trial, method)

    def _check_method(self, trial: cst.ClassDef, method: cst.FunctionDef) -> None:
        name = method.name.value
        if name == "train_batch":
            method.visit(_TrainingSteps(self._file, _wrapped(trial, "wrap_optimizer")))
        if name in _LOADERS and "disable_dataset_reproducibility_checks" not in self._file.edits.text:
            for returned in m.findall(method, m.Return(value=m.Call())):
                loader = cst.ensure_type(cst.ensure_type(returned, cst.Return).value, cst.Call)
                if dotted_name(loader.func) in ("torch.utils.data.DataLoader", *self._torch_names & {"DataLoader"}):
                    self._file.note(loader, Severity.problem, *_LOADER)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (a method of libcst's)
        name = dotted_name(node.func)
        last = node.func.attr.value if isinstance(node.func, cst.Attribute) else name
        if last == "cuda" and isinstance(node.func, cst.Attribute) and name != "torch.cuda":
            self._file.note(node, Severity.check, "a tensor or model is moved to a GPU by hand (.cuda())", _TO_CONTEXT)
        elif last in ("to", "device") and node.args and self._is_cuda(node.args[0].value):
            self._file.note(node, Severity.check, f"a device is named in the code ({self._short(node)})", _TO_CONTEXT)
        elif last == "DistributedSampler" and self._is_torchs(name):
            self._file.note(node, Severity.check, *_SAMPLER)
        elif last == "init_process_group" and not self._connects:
            self._file.note(node, Severity.check, *_GROUP)
        elif last in _BY_NAME and (last != "set_device" or "cuda" in name):
            self._file.note(node, Severity.check, *_BY_NAME[last])
        elif last == "operations" and "searcher" in name:
            advice = "train up to max_length; a search runs one training for each set of hyperparameters"
            self._file.note(node, Severity.problem, "searcher operations come from a Determined master", advice)

    def visit_Arg(self, node: cst.Arg) -> None:  # noqa: N802 (a method of libcst's)
        if node.keyword is not None and node.keyword.value == "device" and self._is_cuda(node.value):
            self._file.note(
                node,
                Severity.check,
                f"a device is named in the code ({self._short(node)})",
                "write device=context.device",
            )

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 (a method of libcst's)
        targets = "".join(self._file.source(target.target) for target in node.targets)
        if "environ" in targets and "CUDA_VISIBLE_DEVICES" in targets:
            self._file.note(
                node,
                Severity.check,
                "GPUs are chosen in the code (CUDA_VISIBLE_DEVICES)",
                "set it where the run is started",
            )

    def visit_Import(self, node: cst.Import) -> None:  # noqa: N802 (a method of libcst's)
        for alias in node.names:
            self._check_module(node, dotted_name(alias.name))

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802 (a method of libcst's)
        if not node.relative:
            module = dotted_name(node.module)
            names = [] if isinstance(node.names, cst.ImportStar) else [alias.evaluated_name for alias in node.names]
            if module.split(".")[0] == "model_hub":
                names = []  # one finding is enough
            for name in names or [""]:
                self._check_module(node, f"{module}.{name}")

    def _check_module(self, node: cst.CSTNode, module: str) -> None:
        if module.startswith("horovod."):
            advice = "use context.distributed for rank and size, and strategy='horovod' to train with Horovod"
            self._file.note(node, Severity.check, "Horovod of your own", advice)
        elif module.startswith("apex.amp") or (module == "apex" and self._needs_apex(node)):
            self._file.note(node, Severity.check, "apex.amp is gone from apex", _APEX)
        elif module.split(".")[0] == "model_hub":
            reason = f"{module.rstrip('.')}: model-hub is built on determined"
            self._file.note(
                node, Severity.problem, reason, "write the trial without it, or copy what is used of it and port that"
            )
        elif module.split(".")[0] == "determined_common":
            reason = f"{module.rstrip('.')}: it belongs to Determined's own tools"
            self._file.note(node, Severity.problem, reason, "use the standard library; for check, use assert")
        elif module.split(".")[0] == "attrdict":
            advice = "pip install attrdict3, which has a module of that name, or use a small class of your own"
            self._file.note(node, Severity.check, "attrdict does not import on Python 3.10 or later", advice)
        elif module.split(".")[0] == "pedl":
            advice = "import the same names from det_lightning.pytorch"
            self._file.note(node, Severity.problem, f"{module}: the package's name before Determined was one", advice)

    def _needs_apex(self, node: cst.CSTNode) -> bool:
        tried = any(isinstance(outer, cst.Try) for outer in self._file.ancestors(node))
        return "apex.amp" in self._file.edits.text and not tried

    def _is_torchs(self, name: str) -> bool:
        return name.startswith(("torch.", "data.", "utils.", "distributed.")) or name in self._torch_names

    def _is_cuda(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.IfExp):
            return self._is_cuda(node.body)
        if isinstance(node, cst.FormattedString):
            return self._file.source(node)[2:].startswith("cuda")
        value = string_of(node)
        return value is not None and _DEVICE.fullmatch(value) is not None

    def _short(self, node: cst.CSTNode) -> str:
        return " ".join(self._file.source(node).split())[:60]


class _TrainingSteps(cst.CSTVisitor):
    """Looks for steps in ``train_batch`` that go around the context."""

    def __init__(self, file: PythonFile, optimizers: set[str]) -> None:
        super().__init__()
        self._file = file
        self._optimizers = optimizers

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 (a method of libcst's)
        if not isinstance(node.func, cst.Attribute):
            return
        owner = dotted_name(node.func.value)
        method = node.func.attr.value
        if method == "backward" and not owner.endswith("context"):
            self._file.note(
                node,
                Severity.check,
                f"{owner or 'a loss'}.backward() goes around the context",
                "call context.backward(loss)",
            )
        elif method == "step" and owner in self._optimizers:
            self._file.note(node, Severity.check, f"{owner}.step() goes around the context", _STEP)
        elif method == "zero_grad" and owner in self._optimizers and "auto_zero_grads" not in self._file.edits.text:
            advice = "remove it: context.step_optimizer() zeroes, where it has stepped"
            self._file.note(node, Severity.check, f"{owner}.zero_grad() clears the gradients of an aggregation", advice)
        elif method in _CLIPPING and not self._is_in_function(node):
            advice = f"pass clip_grads=lambda params: torch.nn.utils.{method}(params, ...) to context.step_optimizer()"
            self._file.note(
                node, Severity.check, f"{method}() clips before gradients are averaged over batches and ranks", advice
            )

    def _is_in_function(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a function within the method, such as one that is passed as ``clip_grads``."""
        around = [outer for outer in self._file.ancestors(node) if isinstance(outer, cst.Lambda | cst.FunctionDef)]
        return isinstance(around[0], cst.Lambda) or around[0].name.value != "train_batch"


def _wrapped(trial: cst.ClassDef, wrapper: str) -> set[str]:
    """Return the attributes that hold what a method of the context wrapped, as ``self.name``."""
    found: set[str] = set()

    class Assignments(cst.CSTVisitor):
        def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 (a method of libcst's)
            if isinstance(node.value, cst.Call) and dotted_name(node.value.func).endswith(f".{wrapper}"):
                found.update(dotted_name(target.target) for target in node.targets)

    trial.visit(Assignments())
    return found - {""}


def _names_from_torch(file: PythonFile) -> set[str]:
    """Return the names that a file imports from torch, and from nowhere else later on."""
    found: set[str] = set()

    class Imports(cst.CSTVisitor):
        def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802 (a method of libcst's)
            if not isinstance(node.names, cst.ImportStar):
                names = {alias.evaluated_alias or alias.evaluated_name for alias in node.names}
                is_torchs = dotted_name(node.module).split(".")[0] == "torch"
                if is_torchs:
                    found.update(names)
                else:
                    found.difference_update(names)

    file.visit(Imports())
    return found
