"""``DistributedContext``: the rank of this process, and exchanges of objects with the other ranks of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from det_lightning.ranks.topology import (
    DEEPSPEED_VARIABLES,
    TORCHRUN_VARIABLES,
    ProcessTopology,
    find_chief_ip,
    find_contradictions,
    find_members,
    topology_from_environment,
    topology_from_horovod,
    validate_topology,
)

if TYPE_CHECKING:
    from det_lightning import errors
    from det_lightning.ranks.exchange import Exchange
    from det_lightning.ranks.session import Session

_DEFAULT_TIMEOUT_S = 1800.0


class DistributedContext:
    """The rank of this process and the size of a run; gathers and broadcasts Python objects over its processes.

    Without arguments, this is the context of a single process. Otherwise all six numbers are needed, and creating the
    context waits for all ranks. No process group is needed, used or changed.

    Objects may be of any size and any type that pickle knows; it is meant for metrics, paths and states, not for
    gradients. All ranks must call the same operations in the same order; an operation returns once all ranks have come.
    The ranks may be processes or threads.

    The objects travel as pickles through a key-value store (``torch.distributed.TCPStore``) between the processes of a
    run: as with ``torch.distributed``, whoever reaches the store's port can run code in the ranks, so on several nodes
    the port must not be open to anybody else. Under ``torchrun`` the agent's store is used. Otherwise rank 0 runs a
    store, which on a single node listens on 127.0.0.1 only.

    Args:
        rank: index of this process among all, 0 being the chief.
        size: number of all processes.
        local_rank: index of this process on the node, 0 being the local chief.
        local_size: number of processes on each node.
        cross_rank: index of the node.
        cross_size: number of nodes.
        chief_ip: the chief's address for other nodes; needed with several nodes.
        pub_port: port of the store on rank 0. Defaults to the environment variable
            ``INTER_TRAIN_PROCESS_COMM_PORT_1``, or 12360. Not used under ``torchrun``.
        pull_port, force_tcp: accepted for compatibility; a single port is enough, and TCP is always used.
        port_offset: added to ``pub_port``, for several runs on the same machines.
        timeout_s: how long an operation, or creating the context, waits for other ranks before raising. Must be longer
            than any work of a rank while others wait, for example writing a checkpoint.

    Attributes:
        topology: the six numbers together; each is an attribute too.

    Raises:
        ValueError: some of the six numbers are missing, contradict each other or the numbers of other ranks, or
            the port or the timeout cannot be used. The message names all mistakes.
        AssertionError: there are several nodes, but no ``chief_ip``.
        RuntimeError: the other ranks could not be reached, or did not come in time. The message names the ranks.

    Example:
        >>> import det_lightning as det
        >>> distributed = det.core.DistributedContext()  # of a single process
        >>> distributed.rank, distributed.size, distributed.gather({"loss": 0.5})
        (0, 1, [{'loss': 0.5}])
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        local_size: int | None = None,
        cross_rank: int | None = None,
        cross_size: int | None = None,
        chief_ip: str | None = None,
        pub_port: int | None = None,
        pull_port: int | None = None,
        port_offset: int = 0,
        force_tcp: bool = False,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        numbers = (rank, size, local_rank, local_size, cross_rank, cross_size)
        self.topology = topology = validate_topology(numbers, timeout_s)
        if topology.cross_size > 1 and chief_ip is None:
            raise AssertionError(
                f"With several nodes (cross_size={topology.cross_size}) DistributedContext needs chief_ip=, the "
                "address of the node of rank 0; the environment variable DET_CHIEF_IP gives it to the from_... methods."
            )
        self.rank = topology.rank
        self.size = topology.size
        self.local_rank = topology.local_rank
        self.local_size = topology.local_size
        self.cross_rank = topology.cross_rank
        self.cross_size = topology.cross_size
        self._session: Session | None = None
        self._all: Exchange | None = None
        self._local: Exchange | None = None
        if self.size > 1:
            self._meet(chief_ip, pub_port, port_offset, timeout_s)

    @classmethod
    def from_torch_distributed(
        cls, chief_ip: str | None = None, *, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> DistributedContext:
        """Read the topology from the environment of a process of ``torchrun``.

        Args:
            chief_ip: the chief's address for other nodes. Defaults to the environment variable ``DET_CHIEF_IP`` or
                ``MASTER_ADDR``.
            timeout_s: see the class, also for further errors.

        Raises:
            ValueError: this process was not started by ``torchrun``; the error, also a KeyError, names variables.
        """
        topology = topology_from_environment("from_torch_distributed() needs torchrun", TORCHRUN_VARIABLES)
        return cls(**vars(topology), chief_ip=find_chief_ip(chief_ip, "MASTER_ADDR"), timeout_s=timeout_s)

    @classmethod
    def from_horovod(
        cls, hvd: Any, chief_ip: str | None = None, *, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> DistributedContext:
        """Ask Horovod for the topology.

        Args:
            hvd: the module ``horovod.torch``, after ``hvd.init()``.
            chief_ip: the chief's address for other nodes. Defaults to the variable ``DET_CHIEF_IP``.
            timeout_s: see the class, also for errors.
        """
        return cls(**vars(topology_from_horovod(hvd)), chief_ip=find_chief_ip(chief_ip), timeout_s=timeout_s)

    @classmethod
    def from_deepspeed(
        cls, chief_ip: str | None = None, *, timeout_s: float = _DEFAULT_TIMEOUT_S
    ) -> DistributedContext:
        """Read the topology from the environment of a process of Determined's DeepSpeed launcher.

        Args:
            chief_ip: the chief's address for other nodes. Defaults to the variable ``DET_CHIEF_IP``.
            timeout_s: see the class, also for further errors.

        Raises:
            ValueError: variables are missing; the error is also a KeyError, and names the variables.
        """
        need = "from_deepspeed() needs the DeepSpeed launcher; under torchrun write from_torch_distributed()"
        topology = topology_from_environment(need, DEEPSPEED_VARIABLES)
        return cls(**vars(topology), chief_ip=find_chief_ip(chief_ip), timeout_s=timeout_s)

    @classmethod
    def from_tf_config(cls) -> NoReturn:
        """Raise a NotImplementedError: this belongs to TensorFlow."""
        raise NotImplementedError(
            "DistributedContext.from_tf_config() belongs to TensorFlow, which det_lightning does not run; use "
            "from_torch_distributed(), or pass the numbers to DistributedContext()."
        )

    def get_rank(self) -> int:
        """Return the index of this process among all."""
        return self.rank

    def get_local_rank(self) -> int:
        """Return the index of this process on the node."""
        return self.local_rank

    def get_size(self) -> int:
        """Return the number of processes."""
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of nodes."""
        return self.cross_size

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return the objects of all ranks, in rank order, on the chief; None elsewhere.

        Raises:
            RuntimeError: another rank has left, did not come within ``timeout_s``, or called a different operation; or
                this context was closed, or has failed before: a failed context can no longer be used. The message names
                the rank. This holds for all exchanges.
        """
        return [stuff] if self._all is None else self._all.gather(stuff)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Like :meth:`gather`, among the processes of this node."""
        return [stuff] if self._local is None else self._local.gather(stuff)

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank."""
        return [stuff] if self._all is None else self._all.allgather(stuff)

    def allgather_as(self, operation: str, stuff: Any = None) -> list[Any]:
        """Like :meth:`allgather`, under a name of its own: ranks that call another operation meanwhile raise."""
        return [stuff] if self._all is None else self._all.allgather(stuff, operation)

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Like :meth:`allgather`, among the processes of this node."""
        return [stuff] if self._local is None else self._local.allgather(stuff)

    def broadcast(self, stuff: Any) -> Any:
        """Return the chief's object on every rank."""
        return stuff if self._all is None else self._all.broadcast(stuff)

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return the object of local rank 0 on every rank of the node."""
        return stuff if self._local is None else self._local.broadcast(stuff)

    def close(self) -> None:
        """Stop taking part in exchanges, and notify the other ranks; a second call does nothing.

        A store on rank 0 keeps running until all ranks have closed, at most 30 s.
        """
        if self._session is not None:
            self._session.close()

    def abandon(self, error: BaseException) -> None:
        """Like :meth:`close`, after an error on this rank: the other ranks get the message, with a shorter wait.

        Under ``torchrun`` the first rank to fail writes the error into ``torchrun``'s error file, and the other ranks
        wait a few seconds, so that ``torchrun`` names the right cause. Call this in an ``except`` block.
        """
        if self._session is not None:
            self._session.fail(error)

    def give_up(self, error: errors.InvalidHP) -> None:
        """Tell the other ranks that this rank gives up on the hyperparameters, which ends all ranks."""
        if self._session is not None:
            self._session.give_up(error)

    @property
    def given_up(self) -> str:
        """Which other rank gave up on the hyperparameters, and why; empty if none is known."""
        return "" if self._session is None else self._session.watch.gave_up

    def meet(self, timeout_s: float, reason: str) -> bool:
        """Return whether all ranks call this within ``timeout_s``; if not, :meth:`close` with a ``reason``."""
        if self._all is None:
            return True
        all_came = self._all.meet(timeout_s, reason)
        if all_came and self._session is not None:
            self._session.forget_giving_up()
        return all_came

    def name_progress(self, describe: Callable[[], str]) -> None:
        """Show the progress of this rank in messages about waiting ranks.

        ``describe`` returns the progress, for example ``"batch 12"``; another thread calls it about once a second.
        """
        if self._session is not None:
            self._session.watch.describe_progress = describe

    def in_batches(self) -> contextlib.AbstractContextManager[None]:
        """Enter a block that works on batches, or waits for their results.

        If no batch is done for a minute, this rank logs its stack.
        """
        return contextlib.nullcontext() if self._session is None else self._session.watch.in_batches()

    def _meet(self, chief_ip: str | None, port: int | None, port_offset: int, timeout_s: float) -> None:
        """Wait for the other ranks, and check that all topologies agree."""
        from det_lightning.ranks.exchange import Exchange  # imports torch, which a single process does not need
        from det_lightning.ranks.session import Session
        from det_lightning.ranks.store import find_store

        address = find_store(self.topology, chief_ip, port, port_offset)
        self._session = session = Session(address, self.rank, self.size, timeout_s)
        try:
            self._all = Exchange(session, "all", "", range(self.size))
            ranks: list[ProcessTopology] = self._all.allgather(self.topology, operation="DistributedContext")
            if problems := find_contradictions(ranks):
                raise ValueError(f"The ranks do not agree: {'; '.join(problems)}.")
        except BaseException as error:
            session.leave(f"its context could not be made: {error}", failed=True)
            raise
        if self.local_size > 1:
            self._local = Exchange(session, f"node{self.cross_rank}", "_local", find_members(ranks, self.cross_rank))


class DummyDistributedContext(DistributedContext):
    """The context of a single process, under Determined's name.

    Example:
        >>> import det_lightning as det
        >>> distributed = det.core.DummyDistributedContext()
        >>> distributed.get_rank(), distributed.allgather("mine")
        (0, ['mine'])
    """

    def __init__(self) -> None:
        super().__init__()
