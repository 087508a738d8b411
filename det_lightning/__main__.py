"""``python -m det_lightning SCRIPT [ARGS...]``: run an unmodified Determined script on det_lightning."""

from __future__ import annotations

import pathlib
import runpy
import sys

from det_lightning import compat

_USAGE = """usage: python -m det_lightning SCRIPT [ARGS...]

Run an unmodified Determined script on det_lightning: what it imports from determined comes from det_lightning.
"""


def main() -> None:
    """Run the script named on the command line, with ``determined`` answered by det_lightning."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_USAGE, end="")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    script = pathlib.Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"det_lightning: there is no script {script}")
    compat.install()
    del sys.argv[0]
    # As Python does for a script: its own directory comes first.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
