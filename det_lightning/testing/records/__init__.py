"""Records of trainings on both sides, and their first difference."""
