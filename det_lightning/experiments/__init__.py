"""Experiments: configurations, their hyperparameter searches, and the trials of the searches."""
