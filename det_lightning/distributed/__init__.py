"""Training one trial in several processes: setting them up, and keeping models equal with DDP, FSDP2 or Horovod."""
