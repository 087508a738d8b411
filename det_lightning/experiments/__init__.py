"""Experiments: a configuration, its hyperparameter search, and the trials that the search runs."""
