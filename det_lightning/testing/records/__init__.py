"""Records of training on both sides, and their first difference."""
