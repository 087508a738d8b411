"""No test asks the Hugging Face hub for anything, or leaves something where downloads are kept."""

import atexit
import os
import shutil
import tempfile

# Read once, when the libraries are imported; processes that the tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="det_lightning-hugging-face-")
# scikit-learn, which datasets imports where it is installed, sets it.
os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
