"""``python -m det_lightning.launch.deepspeed``: prints the replacement for Determined's launcher."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from det_lightning.launch.command_line import split

__path__: list[str] = []  # the import of a missing name becomes an error with the reason

_MESSAGE = """\
error: det_lightning.launch.deepspeed: DeepSpeed's launcher is not covered. Start the script with torchrun:

  python3 -m det_lightning.launch.torch_distributed {script}

A transformers.Trainer with the argument deepspeed uses DeepSpeed under torchrun, too. In the script, write
DistributedContext.from_torch_distributed() in place of from_deepspeed(), and a PyTorchTrial in place of a
DeepSpeedTrial.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a replacement for the command line, by default of this process; return the exit status."""
    _, script = split(list(sys.argv[1:] if arguments is None else arguments))
    print(_MESSAGE.format(script=shlex.join(script) or "python3 train.py"), file=sys.stderr, end="")
    return 2


if __name__ == "__main__":
    sys.exit(main())
