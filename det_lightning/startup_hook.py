"""The start-up hook of trials: its file name, and the comment that accepts it or a line of another file."""

from __future__ import annotations

import re

#: The name of the hook, next to the code.
STARTUP_HOOK = "startup-hook.sh"
_ACCEPTED = re.compile(r"#\s*det-lightning:\s*ok\b")


def is_accepted(text: str) -> bool:
    """Return whether a comment accepts a line, or a hook as a whole."""
    return _ACCEPTED.search(text) is not None
