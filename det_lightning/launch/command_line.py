"""The part of the command line that the launchers share: ``[OPTIONS --] SCRIPT [ARGS]``."""

from __future__ import annotations

import os
import sys


def split(given: list[str]) -> tuple[list[str], list[str]]:
    """Return the options, which end at ``--``, and the script with its arguments."""
    if "--" not in given:
        return [], given
    end = given.index("--")
    return given[:end], given[end + 1 :]


def wants_help(options: list[str], given: list[str]) -> bool:
    """Return whether the launcher is asked for help; after ``--`` the script is."""
    return any(option in ("-h", "--help") for option in options or given[:1])


def problem_of(script: list[str], options: list[str], launcher: str) -> str:
    """Return what is wrong with a script and its arguments; empty if nothing is."""
    if not script:
        return "no script to run is given."
    first = script[0]
    if first.split("=")[0] == "--trial":
        return "--trial is not supported: write a script that calls det_lightning.pytorch.Trainer(...).fit(...)."
    if script == ["-m"]:
        return "-m needs the name of a module."
    if first.startswith("-") and first != "-m":
        where = "it must come before --" if options else "put -- between the options and the script"
        return f"{first} is an option of {launcher}: {where}."
    if first.endswith(".py") and not os.path.isfile(first):  # noqa: PTH113 (shown as it was given)
        return f"there is no script {first}."
    return ""


def as_command(script: list[str]) -> list[str]:
    """Return the command that runs a script with the Python that runs this."""
    first, *rest = script
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    return [sys.executable, *script] if first == "-m" or first.endswith(".py") else script


def gpus_or_one() -> int:
    """Return the number of GPUs, 1 where there are none."""
    import torch  # takes a second, which neither --help nor a mistake should cost

    return max(1, torch.cuda.device_count())
