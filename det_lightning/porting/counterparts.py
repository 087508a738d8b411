"""Counterparts in det_lightning of Determined's names, and findings for names without a counterpart.

The lookup parses the files of det_lightning, because importing the modules would import torch.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import det_lightning
from det_lightning import parts_of_determined
from det_lightning.missing_parts import how_to_install
from det_lightning.porting.findings import Finding, Need, Severity

#: Uses of the Core API without any import: a module may get the context as an argument.
CORE_CONTEXT = re.compile(r"\bcore_context\.(?:checkpoint|preempt|searcher|train)\.")

_ROOT = pathlib.Path(det_lightning.__file__).parent
_PYTORCH = "determined.pytorch"

# The public modules for private modules and for modules of older releases.
_MOVED = {
    "determined._core": "determined.core",
    "determined._execution": "determined",
    "determined._import": "determined",
    "determined._info": "determined",
}
_IN_CORE = ("_checkpoint", "_context", "_distributed", "_experimental", "_preempt", "_profiler", "_searcher",
            "_tensorboard_mode", "_train")  # fmt: skip
_IN_PYTORCH = ("_callback", "_data", "_experimental", "_load", "_lr_scheduler", "_pytorch_context", "_pytorch_trial",
               "_reducer", "_trainer", "_trainer_utils")  # fmt: skip
_MOVED.update({f"determined.core.{module}": "determined.core" for module in _IN_CORE})
_MOVED.update({f"{_PYTORCH}.{module}": _PYTORCH for module in _IN_PYTORCH})
_RENAMED = {
    "determined.__version__.__version__": "determined.__version__",
    "determined.TrialContext": "determined.pytorch.PyTorchTrialContext",
    "determined.pytorch._ShouldExit": "determined.pytorch.ShouldExit",
    "determined.pytorch._SimpleReducer": "determined.pytorch._reducer._SimpleReducer",
    "determined.pytorch._TrainBoundaryType": "determined.pytorch._trainer_utils._TrainBoundaryType",
}
# Modules with names of det_lightning but another purpose.
_BLOCKED = (
    "determined.cli",
    "determined.common",
    "determined.deploy",
    "determined.experimental",
    "determined.keras",
    "determined.launch.deepspeed",
    "determined.lightning",
    "determined.pytorch.deepspeed",
    "determined.pytorch.lightning",
)
_IN_BLOCKED = ("determined.experimental.test_one_batch",)

# For packages that code imports along with Determined, parts of one first: how much it matters, what it is, and what to
# do.
_PACKAGES = {
    "model_hub.mmdetection": (
        Severity.problem,
        "{name}: model-hub's trials of MMDetection are not covered",
        "train with MMDetection 3 and its own Runner, or write a PyTorchTrial around a model of it",
    ),
    "model_hub": (
        Severity.check,
        "{name}: model-hub is built on determined",
        "det-lightning run and pytest --trial give det_lightning.model_hub under this name, and need "
        f"{how_to_install('transformers')}; in other scripts import det_lightning.model_hub",
    ),
    **dict.fromkeys(
        ("determined_cli", "determined_deploy"),
        (Severity.problem, "{name}: it talks to a Determined master", "remove it"),
    ),
    "determined_common": (
        Severity.problem,
        "{name}: it is internal to Determined's tools",
        "use the standard library; for check, use assert",
    ),
    "attrdict": (
        Severity.check,
        "attrdict does not import on Python 3.10 or later",
        "pip install attrdict3, which also installs the module attrdict, or write a small class",
    ),
    "pedl": (
        Severity.problem,
        "{name}: the package's name before Determined was one",
        "import the same names from det_lightning.pytorch",
    ),
}


@functools.cache
def counterpart(path: str) -> str | None:
    """Return the dotted name in det_lightning for Determined's ``path``, or None."""
    is_there = any(_is_below(path, prefix) for prefix in _IN_BLOCKED)
    if not is_there and any(_is_below(path, prefix) for prefix in _BLOCKED):
        return None
    for candidate in _candidates(path):
        for old, new in _RENAMED.items():
            if _is_below(candidate, old):
                candidate = new + candidate.removeprefix(old)
        ours = "det_lightning" + candidate.removeprefix("determined")
        if _exists(ours):
            return ours
    return None


def missing_prefix(path: str) -> str:
    """Return the shortest prefix of ``path`` without a counterpart in det_lightning."""
    parts = path.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next((prefix for prefix in prefixes if counterpart(prefix) is None), path)


def missing(path: str, line: int, need: Need = Need.file) -> Finding:
    """Return the finding for a use of ``path``, a dotted name of Determined without counterpart in det_lightning."""
    part = parts_of_determined.missing_part(path)
    return Finding(line, Severity.problem, f"{part.path}: {part.reason}", part.advice, need)


def package_finding(module: str, line: int) -> Finding | None:
    """Return the finding for an imported or started module; None if there is nothing to do."""
    package = next((name for name in _PACKAGES if _is_below(module, name)), None)
    if package is None:
        return None
    severity, reason, advice = _PACKAGES[package]
    need = Need.file if severity is Severity.problem else Need.nothing
    return Finding(line, severity, reason.format(name=module), advice, need)


@functools.cache
def read_methods(file: str, name: str) -> frozenset[str]:
    """Return the names of the methods of a class in a file of ``det_lightning.pytorch``."""
    tree = ast.parse((_ROOT / "pytorch" / file).read_text(encoding="utf-8"))
    (definition,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return frozenset(node.name for node in definition.body if isinstance(node, ast.FunctionDef))


def _is_below(path: str, prefix: str) -> bool:
    return f"{path}.".startswith(f"{prefix}.")


def _candidates(path: str) -> list[str]:
    """Return where to look for ``path``, in Determined's names."""
    found = [public + path.removeprefix(module) for module, public in _MOVED.items() if _is_below(path, module)]
    # det_lightning has some private modules of the same names; public names come first.
    found.append(path)
    parts = path.split(".")
    if path.startswith(f"{_PYTORCH}."):
        # The package has all public names of the modules.
        found += [".".join([_PYTORCH, *parts[skipped:]]) for skipped in (3, 4) if len(parts) > skipped]
    return found


def _exists(path: str) -> bool:
    module, *rest = path.split(".")
    for name in rest:
        if _find_file(f"{module}.{name}") is None:
            return name in _read_names(module)  # attributes follow
        module = f"{module}.{name}"
    return True


def _find_file(module: str) -> pathlib.Path | None:
    base = _ROOT.joinpath(*module.split(".")[1:])
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def _read_names(module: str) -> frozenset[str]:
    """Return ``__all__`` or else all definitions of a module, plus all imports ``as`` the same name."""
    file = _find_file(module)
    defined: set[str] = set()
    exported: set[str] = set()
    public: set[str] | None = None
    for statement in [] if file is None else ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            defined.add(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            exported |= {alias.name for alias in statement.names if alias.asname == alias.name}
        elif isinstance(statement, ast.Assign):
            assigned = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            if "__all__" in assigned:
                public = set(ast.literal_eval(statement.value))
            defined |= assigned
    return frozenset((defined if public is None else public) | exported)
