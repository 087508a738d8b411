"""A script for the Core API as on a cluster: counts steps, and waits at one until it is asked to end."""

import importlib
import json
import time
from typing import Any

det: Any = importlib.import_module("determined")


def main() -> None:
    info = det.get_cluster_info()
    hparams = info.trial.hparams
    with det.core.init() as core_context:
        train, checkpoint = core_context.train, core_context.checkpoint
        first = 0
        if info.latest_checkpoint is not None:
            with checkpoint.restore_path(info.latest_checkpoint) as path:
                first = json.loads((path / "state.json").read_text())["step"]
        train.set_metadata({"begins_at": first})
        for operation in core_context.searcher.operations():
            for step in range(first + 1, operation.length + 1):
                train.set_status(f"step {step}")
                train.report_training_metrics(step, {"loss": hparams["lr"] / step})
                train.report_validation_metrics(step, {"loss": hparams["lr"] / step})
                train.report_progress(step / operation.length)
                while step == hparams.get("waits_at") and first < step and not core_context.preempt.should_preempt():
                    time.sleep(0.02)
                with checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "state.json").write_text(json.dumps({"step": step}))
                if core_context.preempt.should_preempt():
                    return
            operation.report_completed(hparams["lr"] / operation.length)


if __name__ == "__main__":
    main()
