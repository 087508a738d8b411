"""Decides by the lines of a trial's log whether a failed trial may start again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from det_lightning.config.experiment import compile_log_pattern
from det_lightning.escaping import get_logger, name_some

logger = get_logger(__name__)

# Determined's search takes time in proportion to the log. Python's may take any time for some patterns, and cannot be
# interrupted, so a separate process searches.
_LIMIT_S = 60.0
_SEARCH = """
import json, re, sys
log, policies = json.load(sys.stdin)
with open(log, encoding="utf-8", errors="replace") as lines:
    texts = (line.rstrip("\\n") for line in lines)  # a pattern may end with the line
    print(json.dumps(next((name for text in texts for pattern, name in policies if re.search(pattern, text)), None)))
"""
# A search finds the same lines without this beginning, and far sooner in long lines.
_AT_FIRST = re.compile(r"\A(?:\.\*)+(?![?+{])")


def find_retry_policy(config: dict[str, Any], log: Path, limit_s: float = _LIMIT_S) -> str | None:
    """Return the name or pattern of a policy that matches a line of the log and cancels retries, or None.

    Warn if the log cannot be searched, or not within ``limit_s``.
    """
    patterns = {
        policy["pattern"]: str(policy.get("name") or policy["pattern"])
        for policy in config.get("log_policies") or []
        if policy.get("pattern") and policy.get("action") in ("cancel_retries", {"type": "cancel_retries"})
    }
    if not patterns or not log.exists():
        return None
    policies = [(_AT_FIRST.sub("", compile_log_pattern(given).pattern), name) for given, name in patterns.items()]
    try:
        search = subprocess.run(
            [sys.executable, "-I", "-c", _SEARCH],
            input=json.dumps([str(log), policies]),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
            start_new_session=True,  # Ctrl-C pauses the experiment, and must not end the search
        )
    except subprocess.TimeoutExpired:
        names = name_some([*patterns.values()])
        failure = f"takes over {limit_s:g} s: {names}"
    except subprocess.CalledProcessError as e:
        failure = f"ended with status {e.returncode}: {e.stderr.strip()[-500:]}"
    else:
        found: str | None = json.loads(search.stdout)
        return found
    logger.warning("Searching %s for the log policies %s. No policy is applied.", log, failure)
    return None
