"""The common command line of the launchers: ``[OPTIONS --] SCRIPT [ARGS]``."""

from __future__ import annotations

import os
import sys

from det_lightning.core._task import current_task


def split(given: list[str]) -> tuple[list[str], list[str]]:
    """Return the options before ``--``, and the script with its arguments."""
    if "--" not in given:
        return [], given
    end = given.index("--")
    return given[:end], given[end + 1 :]


def wants_help(options: list[str], given: list[str]) -> bool:
    """Return whether the options ask the launcher for help; after ``--`` they ask the script."""
    return any(option in ("-h", "--help") for option in options or given[:1])


def find_problem(script: list[str], options: list[str], launcher: str) -> str:
    """Say what is wrong with a script and its arguments; return an empty text if nothing is."""
    if not script:
        return "no script to run is given."
    first = script[0]
    if first.split("=")[0] == "--trial":
        if len(read_trial(script)) != 1:
            return "--trial takes the name of a class, as module:Class, and nothing after it."
        if current_task() is None:
            return "--trial works in experiments only: start an experiment with `det-lightning run CONFIG`."
        return ""
    if script == ["-m"]:
        return "-m needs the name of a module."
    if first.startswith("-") and first != "-m":
        where = "it must come before --" if options else "put -- between the options and the script"
        return f"{first} is an option of {launcher}: {where}."
    if first.endswith(".py") and not os.path.isfile(first):  # noqa: PTH113 (shown as it was given)
        return f"there is no script {first}."
    return ""


def read_trial(script: list[str]) -> list[str]:
    """Return the arguments after ``--trial``."""
    _, equals, value = script[0].partition("=")
    return [value, *script[1:]] if equals else script[1:]


def make_command(script: list[str]) -> list[str]:
    """Return the command that runs a script with the current Python."""
    first, *rest = script
    if first.split("=")[0] == "--trial":
        return [sys.executable, "-m", "det_lightning.exec.harness", *read_trial(script)]
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    return [sys.executable, *script] if first == "-m" or first.endswith(".py") else script


def count_slots() -> int:
    """Return the number of slots in a trial of an experiment; elsewhere the number of GPUs, or 1 if there are none."""
    task = current_task()
    if task is not None:
        return max(1, len(task.slots))
    import torch  # takes a second, which --help or a mistake should not cost

    return max(1, torch.cuda.device_count())
