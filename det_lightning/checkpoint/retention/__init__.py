"""Which checkpoints of a trial stay: the rule, the index it is applied to, and deleting the others."""
