"""Lightning, by the one name under which det_lightning imports it; all other modules take it from here."""

from __future__ import annotations

import pytorch_lightning as pl
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.__version__ import version as lightning_version
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
from pytorch_lightning.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector
from pytorch_lightning.trainer.states import RunningStage, TrainerFn

__all__ = [
    "CheckpointConnector",
    "ClusterEnvironment",
    "LightningEnvironment",
    "LoggerConnector",
    "RunningStage",
    "TrainerFn",
    "lightning_version",
    "pl",
]
