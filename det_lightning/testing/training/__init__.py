"""Runs of a trial: its class, its requirements, and training in one process, in two, or on the real determined."""
