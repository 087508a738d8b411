"""The pytest plugin: ``pytest --trial model_def:MyTrial`` checks a ported trial.

Every run of pytest imports this module, so it imports nothing that is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from det_lightning.testing.checks import CHECKS
from det_lightning.testing.options import trial_options
from det_lightning.testing.outcomes import BadTrial

_OPTIONS: dict[str, dict[str, Any]] = {
    "--trial": {"metavar": "MODULE:CLASS", "help": "check this trial; also path/to/file.py:CLASS"},
    "--trial-config": {"metavar": "FILE", "help": "its experiment configuration, such as const.yaml"},
    "--trial-hparams": {"metavar": "JSON", "help": "its hyperparameters; they go before those of the configuration"},
    "--trial-kwargs": {"metavar": "JSON", "help": "arguments of its constructor beyond the context"},
    "--trial-batches": {"metavar": "N", "type": int, "default": 12, "help": "batches of each run (default: 12)"},
    "--trial-reference": {"metavar": "FILE", "help": "compare with this record of the real determined"},
    "--trial-record": {"metavar": "FILE", "help": "keep the record of the real determined that is made here"},
    "--trial-tolerance": {"metavar": "SHARE", "type": float, "help": "how far numbers may be from the reference's"},
    "--trial-checkpoint": {"metavar": "PATH", "help": "load this old checkpoint, and validate with it"},
    "--trial-metrics": {"metavar": "JSON", "help": "its validation metrics, where the checkpoint does not have them"},
    "--trial-report": {"metavar": "FILE", "help": "write the checklist and the curves as an HTML page"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("det_lightning", "checks of a ported Determined trial (det_lightning)")
    for name, settings in _OPTIONS.items():
        group.addoption(name, **settings)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; read the options, and the plugin that checks the trial if one is named."""
    config.addinivalue_line("markers", "trial_check: a check of the trial that --trial names")
    for keyword in dict.fromkeys(check.keyword for check in CHECKS):
        subject = keyword.removeprefix("trial_")
        config.addinivalue_line("markers", f"{keyword}: a check of the trial that --trial names, about {subject}")
    try:
        options = trial_options(config.option, Path(config.invocation_params.dir))
    except BadTrial as e:
        raise pytest.UsageError(str(e)) from None
    if options is not None:
        from det_lightning.testing.session import TrialSession

        config.pluginmanager.register(TrialSession(options), "det_lightning_trial")


@pytest.fixture
def trial_run() -> Callable[..., Any]:
    """Train a trial on a few batches: ``trial_run(MyTrial, hparams={"lr": 0.1}, batches=5)``.

    What it returns has ``metrics``, ``validations``, ``weights``, ``events`` and more: see
    :func:`det_lightning.testing.run_trial`, which it is.
    """
    from det_lightning.testing.assertions import run_trial

    return run_trial
