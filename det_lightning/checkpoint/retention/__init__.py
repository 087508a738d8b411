"""Which checkpoints are kept: the rule, a trial's checkpoints, one writer per trial, pruning."""
