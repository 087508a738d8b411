"""Records of trainings, on either side, and their first difference."""
