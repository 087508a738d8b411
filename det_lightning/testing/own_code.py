"""Which files are the user's own, and their part of a traceback."""

from __future__ import annotations

import traceback
from pathlib import Path


def is_own_file(file: str, directory: Path) -> bool:
    """Tell whether a file is the user's code below ``directory``: no installed package, and nothing of ours."""
    path = Path(file)
    ours = Path(__file__).parents[1]
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and path.is_relative_to(directory) and not path.is_relative_to(ours)


def own_frames(error: BaseException, directory: Path) -> str:
    """Return the traceback of ``error``, shortened to the frames in the user's files, and the error itself."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own_file(frame.filename, directory)]
    for frame in own:
        frame.filename = str(Path(frame.filename).relative_to(directory))
    return f"{''.join(traceback.format_list(own))}{''.join(traceback.format_exception_only(error))}".rstrip()
