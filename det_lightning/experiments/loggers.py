"""The Lightning loggers that ``det-lightning run --logger`` supports, and the packages that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from det_lightning import errors

#: The package that each logger needs in addition to those of det_lightning.
PACKAGES = {"csv": None, "tensorboard": None, "mlflow": "mlflow", "wandb": "wandb"}


def require_loggers(names: Sequence[str]) -> None:
    """Raise an ExperimentError that names all loggers which are not known, or whose packages are not installed."""
    mistakes = [
        f"--logger {name}: is not known; use one of {', '.join(PACKAGES)}" for name in names if name not in PACKAGES
    ]
    packages = {name: package for name in names if (package := PACKAGES.get(name)) is not None}
    missing = {name: package for name, package in packages.items() if importlib.util.find_spec(package) is None}
    mistakes += [f"--logger {name}: needs a package; pip install {package}" for name, package in missing.items()]
    if mistakes:
        raise errors.ExperimentError("; ".join(mistakes) + ".")
