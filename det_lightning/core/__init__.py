"""The processes and the cluster that a script runs on."""

from det_lightning.core._cluster import ClusterInfo, TrialInfo, get_cluster_info
from det_lightning.core._distributed import DistributedContext

__all__ = ["ClusterInfo", "DistributedContext", "TrialInfo", "get_cluster_info"]
