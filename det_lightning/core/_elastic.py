"""The job of torchrun that this process may have been restarted in."""

from __future__ import annotations

import os

# torchrun's name for a job that was not given one.
_UNNAMED = "none"


def elastic_job() -> str | None:
    """Return the id of torchrun's job, which restarts keep; None without torchrun, or if the job has none."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if job in (None, "", _UNNAMED) else job


def restarts() -> int:
    """Return how often torchrun has restarted the processes of this job."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0
