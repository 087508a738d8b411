"""The task of a process as Determined describes a task to scripts: ``ClusterInfo`` and ``TrialInfo``."""

from __future__ import annotations

import dataclasses
from typing import Any

from det_lightning.core._task import TrialTask, current_task


class TrialInfo:
    """The trial of this process, with the fields of Determined 0.38.1.

    Attributes:
        trial_id: number of the trial in the experiment, from 1.
        experiment_id: number of the experiment.
        trial_seed: the seed of the trial's random generators.
        hparams: the values of the hyperparameters.

    Example:
        >>> import det_lightning as det
        >>> info = det.get_cluster_info()
        >>> learning_rate = 0.1 if info is None else info.trial.hparams["lr"]
    """

    def __init__(
        self,
        trial_id: int,
        experiment_id: int,
        trial_seed: int,
        hparams: dict[str, Any],
        config: dict[str, Any],
        steps_completed: int,
        trial_run_id: int,
        debug: bool,
        inter_node_network_interface: str | None,
    ) -> None:
        self.trial_id = trial_id
        self.experiment_id = experiment_id
        self.trial_seed = trial_seed
        self.hparams = hparams
        # Scripts read these, although they are private in Determined too.
        self._config = config
        self._steps_completed = steps_completed
        self._trial_run_id = trial_run_id
        self._debug = debug
        self._inter_node_network_interface = inter_node_network_interface

    @property
    def user_data(self) -> dict[str, Any]:
        """The ``data`` section of the experiment configuration."""
        data: dict[str, Any] = self._config.get("data") or {}
        return data


@dataclasses.dataclass
class RendezvousInfo:
    """The containers of the task: the nodes of a trial on a Ray cluster, elsewhere this machine only.

    Attributes:
        container_addrs: the address of each machine.
        container_rank: index of this machine.
        container_slot_counts: number of slots on each machine.

    Example:
        >>> import det_lightning as det
        >>> rendezvous = det.RendezvousInfo(["127.0.0.1"], container_rank=0, container_slot_counts=[2])
        >>> sum(rendezvous.container_slot_counts)
        2
    """

    container_addrs: list[str]
    container_rank: int
    container_slot_counts: list[int]


class ResourcesInfo:
    """The devices of the task.

    Example:
        >>> import det_lightning as det
        >>> len(det.ResourcesInfo(gpu_uuids=["0", "1"]).gpu_uuids)
        2
    """

    def __init__(self, gpu_uuids: list[str]) -> None:
        self._gpu_uuids = gpu_uuids

    @property
    def gpu_uuids(self) -> list[str]:
        """The identifiers of the GPUs of the task; empty on the CPU."""
        return self._gpu_uuids


class ClusterInfo:
    """The task of this process, with the fields of Determined 0.38.1.

    ``det-lightning run`` stands in for a cluster, so the master's URL and the session token are empty, and cluster and
    agent have fixed names.

    Attributes:
        slot_ids: the slots of the task on this machine.
        task_id, allocation_id: names of the task and of this run.
        task_type: ``"TRIAL"``; there are no other tasks here.

    Example:
        >>> import det_lightning as det
        >>> info = det.get_cluster_info()
        >>> resumes_from = None if info is None else info.latest_checkpoint
    """

    def __init__(
        self,
        master_url: str,
        cluster_id: str,
        agent_id: str,
        slot_ids: list[int],
        task_id: str,
        allocation_id: str,
        session_token: str,
        task_type: str,
        master_cert_name: str | None = None,
        master_cert_file: str | None = None,
        latest_checkpoint: str | None = None,
        trial_info: TrialInfo | None = None,
        rendezvous_info: RendezvousInfo | None = None,
        resources_info: ResourcesInfo | None = None,
    ) -> None:
        self.master_url = master_url
        self.cluster_id = cluster_id
        self.agent_id = agent_id
        self.slot_ids = slot_ids
        self.task_id = task_id
        self.allocation_id = allocation_id
        self.session_token = session_token
        self.task_type = task_type
        self.master_cert_name = master_cert_name
        self.master_cert_file = master_cert_file
        self._latest_checkpoint = latest_checkpoint
        self._trial_info = trial_info
        self._rendezvous_info = rendezvous_info
        self._resources_info = resources_info

    @property
    def latest_checkpoint(self) -> str | None:
        """The checkpoint to resume the trial from; None for a start from scratch."""
        return self._latest_checkpoint if self.task_type == "TRIAL" else None

    @property
    def user_data(self) -> dict[str, Any]:
        """The ``data`` section of the experiment configuration."""
        return self.trial.user_data if self.task_type == "TRIAL" else {}

    @property
    def trial(self) -> TrialInfo:
        """The trial.

        Raises:
            RuntimeError: the task is not a trial.
        """
        if self.task_type != "TRIAL" or self._trial_info is None:
            raise RuntimeError(f"A task of type {self.task_type} has no trial.")
        return self._trial_info

    @property
    def container_addrs(self) -> list[str]:
        """The addresses of the task's machines; raises a ``RuntimeError`` if unknown."""
        return self._rendezvous.container_addrs

    @property
    def container_rank(self) -> int:
        """The index of this machine in the task; raises a ``RuntimeError`` if unknown."""
        return self._rendezvous.container_rank

    @property
    def container_slot_counts(self) -> list[int]:
        """The number of slots on each machine of the task; raises a ``RuntimeError`` if unknown."""
        return self._rendezvous.container_slot_counts

    @property
    def gpu_uuids(self) -> list[str]:
        """The identifiers of the GPUs of the task; raises a ``RuntimeError`` if unknown."""
        if self._resources_info is None:
            raise RuntimeError("The devices of this task are unknown.")
        return self._resources_info.gpu_uuids

    @property
    def _rendezvous(self) -> RendezvousInfo:
        if self.task_type != "TRIAL":  # always one container
            return RendezvousInfo(["127.0.0.1"], container_rank=0, container_slot_counts=[len(self.slot_ids)])
        if self._rendezvous_info is None:
            raise RuntimeError("The machines of this task are unknown.")
        return self._rendezvous_info


def get_cluster_info() -> ClusterInfo | None:
    """Return the trial of this process under ``det-lightning run``; None anywhere else.

    None means that the script runs on its own.

    Example:
        >>> import det_lightning as det
        >>> det.get_cluster_info() is None  # outside of det-lightning run
        True
    """
    task = current_task()
    if task is None:
        return None
    counts = [len(task.slots)] * len(task.container_addrs)
    machines = RendezvousInfo(task.container_addrs, task.container_rank, container_slot_counts=counts)
    return describe_task(task, rendezvous_info=machines, resources_info=ResourcesInfo(task.gpu_uuids))


def describe_task(task: TrialTask, **resources: Any) -> ClusterInfo:
    """Return the description of a trial that scripts see, with the known ``resources``."""
    trial = TrialInfo(
        trial_id=task.trial_id,
        experiment_id=task.experiment_id,
        trial_seed=task.trial_seed,
        hparams=task.hparams,
        config=task.config,
        steps_completed=task.steps_completed,
        trial_run_id=task.run_id,
        debug=bool(task.config.get("debug")),
        inter_node_network_interface=None,
    )
    task_id = f"{task.experiment_id}.{task.trial_id}"
    return ClusterInfo(
        master_url="",
        cluster_id="det-lightning",
        agent_id="localhost",
        slot_ids=task.slots,
        task_id=task_id,
        allocation_id=f"{task_id}.{task.run_id}",
        session_token="",
        task_type="TRIAL",
        latest_checkpoint=task.latest_checkpoint,
        trial_info=trial,
        **resources,
    )
