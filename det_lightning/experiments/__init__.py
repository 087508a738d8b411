"""Experiments: a configuration, the search method that it names, and what runs the trials."""
