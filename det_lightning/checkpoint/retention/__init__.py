"""Retention of checkpoints: the rule, the checkpoints of a trial, claims of live runs, pruning."""
