"""Runs of a trial: its class, what it asks for, one process or several, and how two runs differ."""
