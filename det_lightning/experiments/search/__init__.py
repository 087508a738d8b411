"""Hyperparameter search as in Determined 0.38.1, in plain Python: no clock, no files, no processes.

``search.Search`` answers events of trials with operations. The same events in the same order give the same operations,
so a log of events is the only state to keep: a new ``Search`` continues an old one by replaying the log.
"""
