"""Which checkpoints of a trial to keep: the rule, the index it is applied to, and deleting the others."""
