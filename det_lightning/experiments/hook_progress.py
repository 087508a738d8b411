"""Runs a start-up hook before the entrypoint, and notes which line of the hook was reached.

The note is a file in the trial's directory. bash itself adds each line with a command of the hook, and the step after
the hook empties the file. So a note with content at the end of a run means that the entrypoint never began, however the
hook ended: by a failed command, by ``exit 0``, or by ``exec``.
"""

from __future__ import annotations

from pathlib import Path

from det_lightning.files.local_files import write_whole
from det_lightning.startup_hook import STARTUP_HOOK

_NOTE = "hook.txt"
# A loop may have many lines.
_MOST_BYTES = 4096
_BEGUN = b"0:\n"
# As in Determined's containers, a failing command in the hook ends the run. The hook finds its own value of $_,
# and its own open files: nobody uses a number like 87.
_PROGRAM = """
det_lightning_note=$1
shift
exec 87>>"$det_lightning_note"
set -eT
det_lightning_add_line='printf "%s:%s\\n" "$LINENO" "${BASH_SOURCE[0]:-}" >&87'
trap 'det_lightning_last=$_; { eval "$det_lightning_add_line"; } 2> /dev/null || :; : "$det_lightning_last"' DEBUG
. ./startup-hook.sh
trap - DEBUG
: > "$det_lightning_note"
exec 87>&-
exec "$@"
"""


def add_hook(command: list[str], workdir: Path, directory: Path) -> list[str]:
    """Begin the note in ``directory``; return a command that runs the hook in ``workdir`` first, if there is one."""
    note = directory / _NOTE
    if not (workdir / STARTUP_HOOK).is_file():
        note.unlink(missing_ok=True)
        return command
    write_whole(note, _BEGUN)
    return ["bash", "-c", _PROGRAM, STARTUP_HOOK, str(note), *command]


def describe_hook_end(directory: Path) -> str | None:
    """Return where the hook ended the newest run of a trial; None if the entrypoint began, or without a hook."""
    try:
        with (directory / _NOTE).open("rb") as file:
            file.seek(-min(_MOST_BYTES, file.seek(0, 2)), 2)
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    if not lines:
        return None
    number, _, name = next((line.partition(":") for line in reversed(lines) if not line.endswith(":")), ("", "", ""))
    name = name.removeprefix("./")
    script = "" if name == STARTUP_HOOK else f" of {name}"
    where = f", having reached line {number}{script}{_quote(directory / 'workdir' / name, number)}," if name else ""
    return f"its {STARTUP_HOOK}{where} ended the run before the entrypoint began"


def _quote(script: Path, number: str) -> str:
    try:
        return f" ({script.read_text(errors='replace').splitlines()[int(number) - 1].strip():.80})"
    except (OSError, ValueError, IndexError):
        return ""
