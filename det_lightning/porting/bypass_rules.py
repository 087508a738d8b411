"""Decides which code bypasses a trial's context, or needs a GPU, for ``port`` and ``pytest --trial``."""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings
from collections.abc import Container, Iterator

DEVICE = "device"
PROCESSES = "processes"
GPU = "gpu"

_DEVICE = re.compile(r"(cuda|mps|xpu)(:\d+)?")
_TO_CONTEXT = "wrapped models and batches are placed already; move other tensors with context.to_device(...)"
_CHOSEN = ("a GPU is chosen by hand", "remove it; each process has its own device, context.device")
_TAKES_DEVICE = {"to", "device", "set_default_device"}
_COUNTS_GPUS = {"is_available", "device_count"}
_ASKS_DEVICE = {*_COUNTS_GPUS, "is_cuda"}
# A part of these is evaluated under a condition only, or later.
_CHOICES = (ast.If, ast.IfExp, ast.Try, ast.Match, ast.BoolOp, ast.Lambda)
#: Names that connect processes, or share models and data: the reason and the advice.
PROCESS_NAMES = {
    "DataParallel": ("your own DataParallel", "wrap the model with context.wrap_model() only"),
    "DistributedDataParallel": (
        "your own DistributedDataParallel",
        "wrap the model with context.wrap_model() only; it becomes a DDP model where there are several processes",
    ),
    "DistributedSampler": (
        "your own DistributedSampler",
        "remove it; det_lightning.pytorch.DataLoader shards over the ranks",
    ),
    "init_process_group": (
        "your own process group",
        "remove it from the trial; a training script may make one and pass "
        "distributed=DistributedContext.from_torch_distributed() to det_lightning.pytorch.init()",
    ),
}
_COMMUNICATES = (
    "your own use of torch.distributed",
    "context.distributed has rank, size, allgather and broadcast",
)
#: Functions of ``torch.distributed`` that communicate.
COLLECTIVES = ("init_process_group", "barrier", "reduce", "gather", "scatter", "send", "recv", "broadcast",
               "all_reduce", "all_gather", "all_gather_object", "broadcast_object_list")  # fmt: skip
_HARMLESS = {"is_available", "is_initialized"}


@dataclasses.dataclass(frozen=True)
class Bypass:
    """An expression or assignment that bypasses the context."""

    line: int
    code: str
    kind: str  # DEVICE, PROCESSES, or GPU for code that is no bypass and only needs a GPU
    reason: str
    advice: str
    #: Whether the code means the current GPU, if there is a GPU: such code works in each process of a run.
    follows_availability: bool = False
    needs_gpu: bool = False  # whenever the function around runs


def parse(text: str) -> ast.Module:
    """Parse Python; a file that this Python cannot parse counts as empty."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example about escapes in the project
            return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])


def find_bypasses(tree: ast.Module, left_out: Container[ast.AST] = ()) -> Iterator[Bypass]:
    """Yield the bypasses in a file in the order of lines, except in nodes that are ``left_out``."""
    names = find_torch_names(tree)
    variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    flags = _find_device_flags(tree)
    # A file that asks for GPUs anywhere may choose by the answer in many ways.
    asks = any(get_name(node) in _COUNTS_GPUS for node in ast.walk(tree))
    for node, is_conditional, is_certain in _walk_conditions(tree, left_out, flags, is_certain=not asks):
        line = getattr(node, "lineno", 0)
        if (device := _find_choice(node, flags)) is not None:
            reason, advice, name, follows = device
            code = ast.unparse(node.args if isinstance(node, ast.FunctionDef | ast.Lambda) else node)
            shown = f"{reason} ({code[:60]})" if reason.endswith("code") else reason
            is_current = (follows or is_conditional) and ":" not in name
            needs_gpu = is_certain and isinstance(node, ast.Call | ast.Assign) and not _has_choice(node)
            yield Bypass(line, code, DEVICE, shown, advice, is_current, needs_gpu)
        elif isinstance(node, ast.Call) and (found := _explain_process_call(node, names, variables)) is not None:
            yield Bypass(line, ast.unparse(node), PROCESSES, *found, needs_gpu=is_certain and _takes(node, "nccl"))
        elif is_certain and isinstance(node, ast.Call) and (option := _find_gpu_option(node)):
            yield Bypass(line, ast.unparse(node), GPU, option, "", needs_gpu=True)


def _walk_conditions(
    tree: ast.AST, left_out: Container[ast.AST], flags: set[str], is_conditional: bool = False, is_certain: bool = True
) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield each node with two facts: whether it runs depending on a GPU, and whether it runs in any case."""
    for child in ast.iter_child_nodes(tree):
        if child not in left_out:
            yield child, is_conditional, is_certain
            decides = isinstance(child, ast.If | ast.IfExp) and depends_on_device(child.test, flags)
            is_start = isinstance(child, ast.If) and get_name(getattr(child.test, "left", None)) == "__name__"
            goes_on = is_certain and (is_start or not isinstance(child, _CHOICES))
            yield from _walk_conditions(child, left_out, flags, is_conditional or decides, goes_on)


def depends_on_device(test: ast.AST, flags: Container[str] = ()) -> bool:
    """Return whether a condition asks for the available device, directly or through a flag."""
    return any(
        (isinstance(node, ast.Attribute) and (node.attr in _ASKS_DEVICE or ast.unparse(node).endswith("device.type")))
        or (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in flags)
        for node in ast.walk(test)
    )


def _find_device_flags(tree: ast.AST) -> set[str]:
    """Return the names of flags, as in ``use_cuda = torch.cuda.is_available()``."""
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_flag(node.value)]
    return {ast.unparse(target) for node in assignments for target in node.targets}


def _is_flag(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return get_name(value.func) in _ASKS_DEVICE
    return isinstance(value, ast.Attribute | ast.BoolOp | ast.UnaryOp | ast.Compare) and depends_on_device(value)


def get_name(node: ast.AST | None) -> str:
    """Return the last part of a dotted name; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


_Choice = tuple[str, str, str, bool]  # reason, advice, name of the device, whether it follows what is available


def _find_choice(node: ast.AST, flags: set[str]) -> _Choice | None:
    if isinstance(node, ast.Attribute) and node.attr.endswith("Tensor") and ast.unparse(node.value) == "torch.cuda":
        return "a device is named in the code", _TO_CONTEXT, "cuda", False
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        is_variable = isinstance(node.slice, ast.Constant) and node.slice.value == "CUDA_VISIBLE_DEVICES"
        reason = "GPUs are chosen in the code (CUDA_VISIBLE_DEVICES)"
        return (reason, "set it where the run is started", ":", False) if is_variable else None
    if isinstance(node, ast.Call) and (found := _find_device_of_call(node, flags)) is not None:
        return found
    named = [device for value in _collect_values(node) if (device := _find_device(value, flags)) is not None]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    is_device = any("device" in get_name(target).lower() for target in targets)
    chosen = next((device for device in named if is_device or ":" in device[0]), None)
    return chosen and ("a device is named in the code", _TO_CONTEXT, *chosen)


def _collect_values(node: ast.AST) -> list[ast.expr]:
    """Return the values that a node gives to variables, arguments, keys or a caller."""
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
        values = [node.value]
    elif isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.FunctionDef | ast.Lambda):
        values = [*node.args.defaults, *node.args.kw_defaults]
    elif isinstance(node, ast.Dict):
        values = [*node.values]
    return [value for value in values if value is not None]


def _find_device_of_call(call: ast.Call, flags: set[str]) -> _Choice | None:
    name = get_name(call.func)
    if name == "cuda" and isinstance(call.func, ast.Attribute) and ast.unparse(call.func) != "torch.cuda":
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        if any(get_name(device) == "device" for device in given):
            return None  # the device of the context, or of another tensor
        index = ":" if given else ""
        return "a tensor or model is moved to a GPU by hand (.cuda())", _TO_CONTEXT, f"cuda{index}", False
    if name in ("set_device", "device") and "cuda" in ast.unparse(call.func):
        return *_CHOSEN, ":", False
    given = [keyword.value for keyword in call.keywords if keyword.arg in ("device", "map_location")]
    given += call.args[:1] if name in _TAKES_DEVICE else []
    indices = [value.value for value in given if isinstance(value, ast.Constant) and type(value.value) is int]
    numbers = [(f"cuda:{index}", False) for index in indices]
    named = next((device for value in given if (device := _find_device(value, flags))), next(iter(numbers), None))
    return None if named is None else ("a device is named in the code", _TO_CONTEXT, *named)


def _find_device(value: ast.expr, flags: set[str]) -> tuple[str, bool] | None:
    """Return the GPU that an expression names, and whether only if one is available."""
    if isinstance(value, ast.IfExp):
        found = next((device for part in (value.body, value.orelse) if (device := _find_device(part, flags))), None)
        return found and (found[0], found[1] or depends_on_device(value.test, flags))
    if isinstance(value, ast.JoinedStr):
        text = ast.unparse(value)
        return ("cuda:", False) if text[2:].startswith("cuda") else None
    is_name = isinstance(value, ast.Constant) and isinstance(value.value, str) and _DEVICE.fullmatch(value.value)
    return (is_name.group(), False) if is_name else None


def _has_choice(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.IfExp | ast.BoolOp | ast.Lambda) for inner in ast.walk(node))


def _takes(call: ast.Call, value: str) -> bool:
    """Return whether a call passes ``value``."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(isinstance(one, ast.Constant) and one.value == value for one in given)


def _find_gpu_option(call: ast.Call) -> str:
    """Return the argument, if any, by which a call such as Lightning's or transformers' trainer asks for a GPU."""
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        is_half = keyword.arg == "fp16" and value is True and get_name(call.func).endswith("TrainingArguments")
        if is_half or (keyword.arg == "accelerator" and value in ("gpu", "cuda")):
            return f"{get_name(call.func)}({keyword.arg}={value!r})"
    return ""


def _explain_process_call(call: ast.Call, names: dict[str, str], variables: set[str]) -> tuple[str, str] | None:
    """Return reason and advice for a call that connects processes, unless it is a method of the context."""
    head, dot, rest = ast.unparse(call.func).partition(".")
    dotted = f"{names.get(head, head)}{dot}{rest}"
    module, _, last = dotted.rpartition(".")
    if module == "torch.distributed":
        # A variable of this name, such as a distribution, has other methods.
        is_other = last in _HARMLESS or (head in variables and last not in COLLECTIVES)
        return None if is_other else PROCESS_NAMES.get(last, _COMMUNICATES)
    # The context's package has a class of this name for samplers.
    of_torch = dotted.startswith(("torch.", "data.", "utils.", "distributed."))
    return PROCESS_NAMES.get(last) if of_torch or last != "DistributedSampler" else None


def find_torch_names(tree: ast.Module) -> dict[str, str]:
    """Return the names that a file imports from torch, unless a later import takes the name, with their full names."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name != "torch"}
        elif isinstance(node, ast.ImportFrom):
            bound = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found = {name: original for name, original in found.items() if name not in bound} | bound
    return {name: original for name, original in found.items() if original.startswith("torch.")}
