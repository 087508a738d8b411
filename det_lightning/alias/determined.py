"""``import determined`` with this directory on the search path: imports det_lightning."""

import sys

if __name__ == "determined":
    from det_lightning import compat

    # The import system gives whoever imports this module what is in its place when it has run.
    del sys.modules[__name__]
    compat.install()
    import determined  # noqa: F401
