"""Runs of a trial: its class, its requirements, and training in this process or on the real determined."""
