"""``import determined`` with this directory on the search path: imports det_lightning."""

import sys

if __name__ == "determined":
    from det_lightning import compat

    # An import returns the module found under this name after this file has run.
    del sys.modules[__name__]
    compat.install()
    import determined  # noqa: F401
