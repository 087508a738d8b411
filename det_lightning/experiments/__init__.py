"""Experiments: a configuration, the search that it names, and the trials that it runs."""
