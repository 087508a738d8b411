"""pytest with another choice of the package that Lightning is imported from.

python -m tests.with_package PACKAGE [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import sys

import pytest

if __name__ == "__main__":
    os.environ["DET_LIGHTNING_PACKAGE"] = sys.argv[1]
    sys.exit(pytest.main(sys.argv[2:]))
