"""``python -m det_lightning.launch.deepspeed``: prints the replacement for Determined's launcher."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from det_lightning.launch.command_line import read_trial, split
from det_lightning.missing_parts import attribute_error

#: Makes an import of a helper of Determined's launcher raise the error that says why it is missing.
__path__: list[str] = []

_LAUNCHER = "python3 -m det_lightning.launch.torch_distributed"
_ERROR = """\
error: det_lightning.launch.deepspeed: DeepSpeed's launcher is not covered. Determined starts DeepSpeed's own with it, \
for DeepSpeedTrial, which det_lightning does not have.
"""
_OF_SCRIPTS = """\
Start the script with torchrun:

  {command}

A transformers.Trainer with the argument deepspeed uses DeepSpeed under torchrun, too. In the script, write
DistributedContext.from_torch_distributed() in place of from_deepspeed().
"""
_OF_TRIALS = """\
Write {trial} as a PyTorchTrial; several processes train it with

  {command}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a replacement for the command line, by default of this process; return the exit status."""
    _, script = split(list(sys.argv[1:] if arguments is None else arguments))
    advice = _OF_SCRIPTS
    trial = "the trial"
    if script and script[0].split("=")[0] == "--trial":
        advice = _OF_TRIALS
        trial = (read_trial(script) or [trial])[0]
    command = f"{_LAUNCHER} {shlex.join(script) or 'python3 train.py'}"
    print(_ERROR + advice.format(command=command, trial=trial), file=sys.stderr, end="")
    return 2


def __getattr__(name: str) -> NoReturn:
    raise attribute_error(__name__, name)


if __name__ == "__main__":
    sys.exit(main())
