"""The loggers of Lightning that ``det-lightning run --logger`` knows, and the packages that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from det_lightning import errors

#: The package that each logger needs beyond those of det_lightning.
PACKAGES = {"csv": None, "tensorboard": None, "mlflow": "mlflow", "wandb": "wandb"}


def require_loggers(names: Sequence[str]) -> None:
    """Raise an error that names all loggers that are not known, and the packages that are not installed.

    Raises:
        ExperimentError: there are such.
    """
    mistakes = [
        f"--logger {name}: is not known; use one of {', '.join(PACKAGES)}" for name in names if name not in PACKAGES
    ]
    packages = {name: package for name in names if (package := PACKAGES.get(name)) is not None}
    missing = {name: package for name, package in packages.items() if importlib.util.find_spec(package) is None}
    mistakes += [f"--logger {name}: needs a package; pip install {package}" for name, package in missing.items()]
    if mistakes:
        raise errors.ExperimentError("; ".join(mistakes) + ".")
