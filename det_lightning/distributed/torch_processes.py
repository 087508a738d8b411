"""The processes that torchrun started, if a script leaves connecting them to ``init()``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from det_lightning.core._distributed import DistributedContext

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_one_of_several() -> bool:
    """Return whether torchrun, or a launcher based on it, started this process and others."""
    return all(name in os.environ for name in _OF_TORCHRUN) and os.environ["WORLD_SIZE"] != "1"


def torchrun_context() -> DistributedContext:
    """Return the processes of torchrun, with ``torch.distributed`` between them; all of them must call this.

    A process group that the script has created is used. One that is created here stays for the next ``init()``.
    """
    if not dist.is_initialized():
        on_gpu = device_of(int(os.environ["LOCAL_RANK"])).type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return DistributedContext.from_torch_distributed()


def device_of(local_rank: int) -> torch.device:
    """Return the device of a process, and make it torch's current one; raise a ValueError if there are too few GPUs."""
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(
            f"There are more processes on this node than its {count} GPUs: no GPU for local rank {local_rank}. Start "
            f"at most {count} here (--nproc-per-node), or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
