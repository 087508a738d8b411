"""Observation of a trial: calls, accesses and state in training, and the source."""
