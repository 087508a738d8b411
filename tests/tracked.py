"""The files of the repository, without what runs of examples leave in a clone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Where the examples write, in a tree without git.
_OUTPUT = "examples/*/output/**"


def tracked(*patterns: str) -> list[Path]:
    """Return the files that match the patterns, as ``Path.glob`` does, among those that git tracks."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    git = shutil.which("git")
    if git is not None and (ROOT / ".git").exists():
        listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        if listed.returncode == 0:
            return sorted(found & {ROOT / name for name in listed.stdout.split("\0")})
    return sorted(found - {*ROOT.glob(_OUTPUT)})
