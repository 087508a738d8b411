"""How several processes train one trial: setting them up, and keeping their models equal by DDP, FSDP2 or Horovod."""
