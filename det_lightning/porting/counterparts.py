"""Where the names of Determined are in det_lightning, found in its files: importing them would bring torch."""

from __future__ import annotations

import ast
import functools
import pathlib

import det_lightning

_ROOT = pathlib.Path(det_lightning.__file__).parent
_PYTORCH = "determined.pytorch"

# Private modules, and modules of older releases, by the public module that has their names.
_MOVED = {
    "determined._core": "determined.core",
    "determined._execution": "determined",
    "determined._import": "determined",
    "determined._info": "determined",
    "determined.core._distributed": "determined.core",
    **{
        f"determined.pytorch.{module}": _PYTORCH
        for module in (
            "_callback",
            "_data",
            "_experimental",
            "_load",
            "_lr_scheduler",
            "_pytorch_context",
            "_pytorch_trial",
            "_reducer",
            "_trainer",
            "_trainer_utils",
        )
    },
}
_RENAMED = {
    "determined.TrialContext": "determined.pytorch.PyTorchTrialContext",
    "determined.pytorch._ShouldExit": "determined.pytorch.ShouldExit",
}
# Modules that bear a name of ours, or hold names of ours, and are something else.
_BLOCKED = (
    "determined.cli",
    "determined.common",
    "determined.deploy",
    "determined.experimental",
    "determined.keras",
    "determined.lightning",
    "determined.pytorch.deepspeed",
    "determined.pytorch.experimental",
    "determined.pytorch.lightning",
    "determined.transformers",
)
_IN_BLOCKED = ("determined.experimental.test_one_batch",)


def is_blocked(path: str) -> bool:
    """Return whether ``path`` lies in a part of Determined that det_lightning does not cover."""
    return path not in _IN_BLOCKED and any(path == prefix or path.startswith(f"{prefix}.") for prefix in _BLOCKED)


@functools.cache
def counterpart(path: str) -> str | None:
    """Return the dotted name in det_lightning of what Determined has at ``path``; None if there is nothing.

    Args:
        path: a dotted name that begins with ``determined``: a module, a name in one, or attributes of such a name.
    """
    if is_blocked(path):
        return None
    for candidate in _candidates(path):
        ours = "det_lightning" + candidate.removeprefix("determined")
        if _exists(ours):
            return ours
    return None


@functools.cache
def callback_hooks() -> frozenset[str]:
    """Return the names of the methods of ``PyTorchCallback``."""
    tree = ast.parse((_ROOT / "pytorch" / "_callback.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _candidates(path: str) -> list[str]:
    """Return where to look for ``path``, in Determined's names."""
    found = [
        public + path.removeprefix(module)
        for module, public in _MOVED.items()
        if path == module or path.startswith(f"{module}.")
    ]
    # We have some private modules too, by the same names; a public name is the better one.
    found.append(path)
    parts = path.split(".")
    if path.startswith(f"{_PYTORCH}."):
        # All public names of its modules are names of the package too.
        found += [".".join([_PYTORCH, *parts[skipped:]]) for skipped in (3, 4) if len(parts) > skipped]
    return [_renamed(candidate) for candidate in found]


def _renamed(path: str) -> str:
    for old, new in _RENAMED.items():
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path


def _exists(path: str) -> bool:
    module, *rest = path.split(".")
    for name in rest:
        if _file_of(f"{module}.{name}") is not None:
            module = f"{module}.{name}"
        else:
            return name in _names_in(module)  # what follows are attributes of its value
    return True


def _file_of(module: str) -> pathlib.Path | None:
    base = _ROOT.joinpath(*module.split(".")[1:])
    for file in (base / "__init__.py", base.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@functools.cache
def _names_in(module: str) -> frozenset[str]:
    file = _file_of(module)
    if file is None:
        return frozenset()
    names: set[str] = set()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and any(_is_all(target) for target in statement.targets):
            return frozenset(ast.literal_eval(statement.value))
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _is_all(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"
