"""What is said of packages that code for Determined imports beside ``determined``."""

from __future__ import annotations

from det_lightning.porting.findings import Finding, Need, Severity

# By the package, a part of one first: how much it matters, what it is, and what to do.
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
        "pip install 'det-lightning[transformers]'; in other scripts import det_lightning.model_hub",
    ),
    "determined_common": (
        Severity.problem,
        "{name}: it is internal to Determined's tools",
        "use the standard library; for check, use assert",
    ),
    "attrdict": (
        Severity.check,
        "attrdict does not import on Python 3.10 or later",
        "pip install attrdict3, which has a module of that name, or write a small class",
    ),
    "pedl": (
        Severity.problem,
        "{name}: the package's name before Determined was one",
        "import the same names from det_lightning.pytorch",
    ),
}


def package_finding(module: str, line: int) -> Finding | None:
    """Return the finding for a module that is imported or started; None if there is nothing to say of it."""
    package = next((name for name in _PACKAGES if f"{module}.".startswith(f"{name}.")), None)
    if package is None:
        return None
    severity, reason, advice = _PACKAGES[package]
    need = Need.file if severity is Severity.problem else Need.nothing
    return Finding(line, severity, reason.format(name=module), advice, need)
