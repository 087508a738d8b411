"""What a script asks about the processes and the cluster that it runs on."""

from det_lightning.core.cluster import ClusterInfo, TrialInfo, get_cluster_info
from det_lightning.core.distributed import DistributedContext

__all__ = ["ClusterInfo", "DistributedContext", "TrialInfo", "get_cluster_info"]
