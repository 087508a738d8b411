"""Lightning strategies that train a trial in several processes, by the names of ``pl.Trainer(strategy=...)``."""

from det_lightning.adapters.strategies.ddp import PerModelDDPStrategy
from det_lightning.adapters.strategies.fsdp import PerModelFSDPStrategy
from det_lightning.adapters.strategies.horovod import HorovodStrategy

__all__ = ["HorovodStrategy", "PerModelDDPStrategy", "PerModelFSDPStrategy"]
