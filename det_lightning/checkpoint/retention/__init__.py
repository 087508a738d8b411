"""Retention of checkpoints: the rule, the checkpoints of a trial, one writer per trial, pruning."""
