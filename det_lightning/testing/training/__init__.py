"""Runs of a trial: import, requirements, and training in this process, in others, or on the real determined."""
