"""``python -m det_lightning [-m] SCRIPT [ARGS...]``: run an unmodified Determined script on det_lightning."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import runpy
import sys

from det_lightning import compat

_USAGE = """usage: python -m det_lightning SCRIPT [ARGS...]
       python -m det_lightning -m MODULE [ARGS...]

Run an unmodified Determined script, or a module, on det_lightning: every import from determined, also in child
processes, imports det_lightning.
"""


def main() -> None:
    """Run the script or module on the command line, with det_lightning as ``determined``."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help") or sys.argv[1:] == ["-m"]:
        print(_USAGE, end="")
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    compat.install()
    # For commands started by the script, for example a launcher.
    search_path = [str(compat.ALIAS_DIRECTORY), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        _run_module(sys.argv[0])
    else:
        _run_script(pathlib.Path(sys.argv[0]))


def _run_script(script: pathlib.Path) -> None:
    if not script.is_file():
        sys.exit(f"det_lightning: there is no script {script}")
    # As in Python itself, the directory of the script comes first.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _run_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None:
        sys.exit(f"det_lightning: there is no module {name}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
