"""Log policies: lines in a trial's log that forbid starting it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from det_lightning.config import go_patterns


def policy_against_retries(config: dict[str, Any], log: Path) -> str | None:
    """Return the name or pattern of a policy that matches a line of the log and cancels retries; None if there is none.

    Raises:
        OSError: the log cannot be read.
    """
    patterns = {
        go_patterns.compiled(policy["pattern"]): policy.get("name") or policy["pattern"]
        for policy in config.get("log_policies") or []
        if policy.get("pattern") and _action_of(policy) == "cancel_retries"
    }
    if not patterns or not log.exists():
        return None
    with log.open(encoding="utf-8", errors="replace") as lines:
        # The pattern may end with the line, without its break.
        texts = (line.rstrip("\n") for line in lines)
        matching = (name for text in texts for pattern, name in patterns.items() if pattern.search(text))
        found = next(matching, None)
    return None if found is None else str(found)


def _action_of(policy: dict[str, Any]) -> str | None:
    action = policy.get("action")
    return action.get("type") if isinstance(action, dict) else action
