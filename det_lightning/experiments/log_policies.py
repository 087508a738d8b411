"""Decides by the lines of a trial's log whether a failed trial may start again.

Change here: an action is a value of ``LogPolicy`` in ``det_lightning/config/experiment.py``. The runner,
``det_lightning/experiments/runner.py``, asks through ``Launcher`` in ``det_lightning/experiments/launcher.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from det_lightning.config.experiment import compile_log_pattern

# A search finds the same lines without this beginning, and far sooner in long lines.
_AT_FIRST = re.compile(r"\A(?:\.\*)+(?![?+{])")


def find_retry_policy(config: dict[str, Any], log: Path) -> str | None:
    """Return the name or pattern of a policy that matches a line of the log and cancels retries, or None."""
    patterns = {
        policy["pattern"]: str(policy.get("name") or policy["pattern"])
        for policy in config.get("log_policies") or []
        if policy.get("pattern") and policy.get("action") in ("cancel_retries", {"type": "cancel_retries"})
    }
    if not patterns or not log.exists():
        return None
    policies = [(re.compile(_AT_FIRST.sub("", compile_log_pattern(one).pattern)), patterns[one]) for one in patterns]
    with log.open(encoding="utf-8", errors="replace") as lines:
        texts = (line.rstrip("\n") for line in lines)  # a pattern may end with the line
        return next((name for text in texts for pattern, name in policies if pattern.search(text)), None)
