"""``import model_hub`` with this directory on the search path: det_lightning's, or another package of this name."""

import importlib
import sys

if __name__ == "model_hub":
    from det_lightning import compat

    # The import system gives whoever imports this module what is in its place when it has run: a package of that name
    # which comes later on the search path, otherwise det_lightning's.
    del sys.modules[__name__]
    compat.install()
    position = sys.path.index(str(compat.ALIAS_DIRECTORY))
    del sys.path[position]
    try:
        importlib.import_module(__name__)
    finally:
        sys.path.insert(position, str(compat.ALIAS_DIRECTORY))
