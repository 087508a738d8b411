"""No test asks the Hugging Face hub for anything."""

import os

# Read once, when the library is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
