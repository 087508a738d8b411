"""Lightning strategies that train a trial in several processes, by the names of ``pl.Trainer(strategy=...)``."""

from det_lightning.adapters.strategies.horovod import HorovodStrategy
from det_lightning.adapters.strategies.per_model import PerModelDDPStrategy, PerModelFSDPStrategy

__all__ = ["HorovodStrategy", "PerModelDDPStrategy", "PerModelFSDPStrategy"]
