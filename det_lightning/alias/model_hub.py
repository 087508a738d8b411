"""``import model_hub`` with this directory on the search path: det_lightning's, or another package of this name."""

import importlib
import sys

if __name__ == "model_hub":
    from det_lightning import compat

    # An import returns the module found under this name after this file has run: another package of the name later on
    # the search path, otherwise det_lightning's.
    del sys.modules[__name__]
    compat.install()
    position = sys.path.index(str(compat.ALIAS_DIRECTORY))
    del sys.path[position]
    try:
        importlib.import_module(__name__)
    finally:
        sys.path.insert(position, str(compat.ALIAS_DIRECTORY))
