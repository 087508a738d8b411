"""One rank of runs on one of the two sides, under horovodrun; writes what happened to a file.

horovodrun -np 2 python -m tests.distributed.horovod.determined_ranks SIDE CASES OUTPUT_DIR
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from tests.conformance import trials
from tests.conformance.sides import as_unit, own_ports, run


def main(side: str, cases: dict[str, Any], output: Path) -> None:
    if side == "determined":
        # The real one does this when it is started by its own launcher, on a cluster.
        of_determined = importlib.import_module("determined.horovod").hvd
        of_determined.require_horovod_type("torch", "a test runs it off the cluster")
    import horovod.torch as hvd

    hvd.init()
    broadcast = hvd.broadcast_optimizer_state

    def broadcast_if_any(optimizer: Any, root_rank: int) -> None:
        if optimizer.state_dict()["state"]:
            broadcast(optimizer, root_rank)

    traces = {}
    for name, (trial, options) in cases.items():
        # To give a new optimizer a state Horovod makes a step with gradients of zero.
        hvd.broadcast_optimizer_state = broadcast if options.pop("hidden_step", False) else broadcast_if_any
        context_class = importlib.import_module(f"{side}.core").DistributedContext
        with own_ports(context_class, lambda mine: hvd.broadcast_object(mine, 0, name="ports")):
            distributed = context_class.from_horovod(hvd)
        init = {**options.pop("init", {}), "distributed": distributed}
        units = {argument: as_unit(value) for argument, value in options.items()}
        traces[name] = run(side, getattr(trials, trial), init=init, **units)
        hvd.barrier()
    (output / f"{hvd.rank()}.pkl").write_bytes(pickle.dumps(traces))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
