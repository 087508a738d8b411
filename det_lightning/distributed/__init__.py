"""Trains a trial in several processes: connects them, and keeps models equal by DDP, FSDP2 or Horovod."""
