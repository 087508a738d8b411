"""Decides whether torchrun or Horovod connects the processes of a run."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from det_lightning.distributed.backend import choose_device
from det_lightning.escaping import get_logger
from det_lightning.missing_parts import how_to_build_horovod
from det_lightning.ranks.distributed_context import DistributedContext
from det_lightning.ranks.topology import free_port, topology_from_horovod

logger = get_logger(__name__)

_WANTED = "USE_HOROVOD"
_OF_HOROVODRUN = "HOROVOD_RANK"
_OF_OTHERS = ("USE_TORCH_DISTRIBUTED", "USE_DEEPSPEED", "TORCHELASTIC_RUN_ID")
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_LAUNCHERS = (_OF_HOROVODRUN, "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def horovod_is_wanted() -> bool:
    """Return whether the environment asks for Horovod: ``USE_HOROVOD`` is set, or ``horovodrun`` started the process.

    After ``torch.distributed`` was connected, a process of ``horovodrun`` does not count.
    """
    return bool(os.environ.get(_WANTED)) or (_OF_HOROVODRUN in os.environ and not dist.is_initialized())


def connect_horovod() -> Any:
    """Return ``horovod.torch``, connected to the other processes of the run.

    Raise an ImportError if Horovod is not installed or lacks torch, a ValueError if the environment asks for something
    else.
    """
    others = [f"{name}={os.environ[name]}" for name in _OF_OTHERS if os.environ.get(name)]
    if others:
        raise ValueError(
            f"This run trains with Horovod, but {', '.join(others)} in the environment asks for another launcher. "
            "Start the script either with horovodrun or det_lightning.launch.horovod, or with torchrun or "
            "det_lightning.launch.torch_distributed and without USE_HOROVOD."
        )
    try:
        import horovod.torch as hvd
    except ImportError as e:
        raise ImportError(
            f"This run trains with Horovod, which cannot be imported ({e}). {how_to_build_horovod()}"
        ) from e
    if not hvd.is_initialized():
        hvd.init()
        if hvd.size() == 1 and not any(name in os.environ for name in _OF_LAUNCHERS):
            logger.warning(
                "Horovod knows of one process only, so this process trains alone. For several processes, start the "
                "script with 'horovodrun -np N python SCRIPT' or 'python -m det_lightning.launch.horovod'."
            )
    return hvd


def refuse_horovod(strategy: str) -> None:
    """Raise a ValueError if the environment asks for Horovod although another strategy was chosen."""
    if horovod_is_wanted():
        raise ValueError(
            f"The strategy is {strategy!r}, and the environment asks for Horovod "
            f"({_WANTED if os.environ.get(_WANTED) else _OF_HOROVODRUN} is set). Choose strategy='horovod', or start "
            "the script without USE_HOROVOD and horovodrun."
        )


def connect_horovod_ranks() -> DistributedContext:
    """Return the context of Horovod's processes; all processes must call this."""
    hvd = connect_horovod()
    topology = topology_from_horovod(hvd)
    if topology.size == 1:
        return DistributedContext()
    port = hvd.broadcast_object(free_port(), 0, name="det_lightning.port")
    # The address of the first node, where horovodrun was started.
    chief_ip = os.environ.get("DET_CHIEF_IP") or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return DistributedContext(**vars(topology), chief_ip=chief_ip, pub_port=port)


def is_one_of_several() -> bool:
    """Return whether torchrun, or a launcher based on torchrun, started several processes."""
    return all(name in os.environ for name in _OF_TORCHRUN) and os.environ["WORLD_SIZE"] != "1"


def connect_torchrun_ranks() -> DistributedContext:
    """Return the context of torchrun's processes, connected by ``torch.distributed``; all processes must call this.

    A process group of the script is used. A new process group stays for the next ``init()``.
    """
    if not dist.is_initialized():
        on_gpu = select_device(int(os.environ["LOCAL_RANK"])).type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return DistributedContext.from_torch_distributed()


def select_device(local_rank: int) -> torch.device:
    """Return the device of a process, and select the device in torch; raise a ValueError if there are too few GPUs."""
    device = choose_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
