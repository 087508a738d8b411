"""Training a trial in several processes: process setup, and equal models with DDP, FSDP2 or Horovod."""
