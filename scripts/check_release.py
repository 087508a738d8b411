"""Check that a release's tag, pyproject.toml, CITATION.cff and CHANGELOG.md name the same version.

python scripts/check_release.py v0.1.0
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {
    "pyproject.toml": re.compile(r'^version = "(.+)"$', re.MULTILINE),
    "CITATION.cff": re.compile(r"^version: (.+)$", re.MULTILINE),
    # The newest section with a date: one that is not released yet has none.
    "CHANGELOG.md": re.compile(r"^## \[(\d[^]]*)\] - \d{4}-\d{2}-\d{2}$", re.MULTILINE),
}


def main() -> None:
    """Exit with the names of the files that have another version than the tag."""
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/check_release.py TAG")
    tag = sys.argv[1]
    found = {name: pattern.search((ROOT / name).read_text(encoding="utf-8")) for name, pattern in VERSIONS.items()}
    versions = {name: match[1] if match else "no version with a date" for name, match in found.items()}
    wrong = [f"{name} has {version}" for name, version in versions.items() if f"v{version}" != tag]
    if wrong:
        sys.exit(f"The tag is {tag}, but {', '.join(wrong)}.")
    print(f"{tag} is the version of {', '.join(versions)}.")


if __name__ == "__main__":
    main()
