"""Records of training on both sides, and the first difference."""
